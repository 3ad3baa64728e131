// The network's walk over the layers (layers_cuda.h); what their kernels do not take is the library's ops.
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "ops/conv1d_gnm/conv1d_gnm.h"
#include "ops/residual_block1d/residual_block1d.h"
#include "ops/unet1d_batch/layers_cuda.h"
#include "ops/unet1d_batch/packing_cuda.h"

namespace dpa::unet1d_batch {
namespace {

constexpr int kFinalGroups = 8;  // of the last Conv1dBlock, whatever num_groups is

class Forward : Layers {
 public:
  Forward(const BatchPlan& plan, at::TensorList parameters, const Tensor& packed, const OptionalTensor& local = {})
      : Layers(plan, parameters, packed), local_(value_or_undefined(local)) {}

  Tensor run(const Tensor& sample, const Tensor& timesteps, const Tensor& global_cond) {
    batch_ = sample.size(0), length_ = sample.size(1);
    const auto x = prepare(sample, timesteps, {});
    modulate(global_cond);
    return last(final_block(walk({x, {}})), packed_.scalar_type());
  }
  /// The same in float32, where FiLM's parts are known: of the timestep, (film_rows), and of the samples, (B, film_rows), or
  /// undefined.
  Tensor run_on_film(const Tensor& sample, const Tensor& step, const Tensor& cond) {
    batch_ = sample.size(0), length_ = sample.size(1);
    film_ = cond.defined() ? empty({batch_, plan_.film_rows}) : step.unsqueeze(0).expand({batch_, -1});
    const auto x = prepare(sample, {}, cond.defined() ? std::array{step, cond} : std::array<Tensor, 2>());
    return last(final_block(walk({x, {}})), at::kFloat);
  }
  /// Those parts, of all timesteps: (S, film_rows) and (B, film_rows).
  std::array<Tensor, 2> film(const Tensor& timesteps, const Tensor& global_cond) {
    prepare({}, timesteps, {});
    const auto embedded = dense(hidden(), plan_.time[1]);
    const int64_t width = gemm::padded_to_lines(plan_.step_dim + plan_.cond_dim);
    const auto step = film_of(activate(embedded, Tensor(), embedded.size(0), width), packed(plan_.film_bias));
    if (!global_cond.defined()) return {step, Tensor()};
    const auto none = at::zeros({1, plan_.step_dim}, packed_.options());  // Mish of zero is zero
    return {step, film_of(activate(none, as_input(global_cond), global_cond.size(0), width), nullptr)};
  }

 private:
  Activation walk(Activation x) {
    std::vector<Activation> skips;
    const size_t levels = plan_.levels;
    for (size_t i = 0; i < levels; ++i) {
      x = block(x);
      if (i == 0 && local_.defined()) x = {x.values.add_(local_.transpose(1, 2)), {}};
      x = block(x);
      skips.push_back(x);
      if (i + 1 < levels) x = resample(x, plan_.down[i], /*up=*/false);
    }
    x = block(block(x));
    for (size_t i = 0; i + 1 < levels; ++i) {
      x = resample(block(block(x, skips.back())), plan_.up[i], /*up=*/true);
      skips.pop_back();
    }
    return x;
  }

  /// The sample as channels-last activations, channels padded to a multiple of 8; keeps the timesteps' sinusoids, and
  /// the sum of FiLM's parts. Any of the three may be undefined.
  Tensor prepare(const Tensor& sample, const Tensor& timesteps, const std::array<Tensor, 2>& film) {
    rows::Inputs in{};
    Tensor out, x, steps;
    in.dtype = in.sample_dtype = dtype_, in.action_dim = plan_.action_dim, in.step_dim = plan_.step_dim;
    in.action_width = static_cast<int>(gemm::padded(plan_.action_dim));
    in.step_width = static_cast<int>(gemm::padded(plan_.step_dim));
    if (sample.defined()) {
      x = as_input(sample), out = empty({batch_, length_, in.action_width}), in.rows = batch_ * length_;
      in.sample_dtype = kernel_dtype(x.scalar_type()), in.sample = x.const_data_ptr();
      in.sample_rows = out.mutable_data_ptr();
    }
    if (timesteps.defined()) {
      in.integers = timesteps.scalar_type() == at::kLong;
      steps = (in.integers ? timesteps : timesteps.to(at::kFloat)).contiguous();
      in.timesteps = steps.const_data_ptr(), in.times = steps.size(0);
      embedding_ = empty({in.times, in.step_width}), in.sinusoids = embedding_.mutable_data_ptr();
    }
    if (film[0].defined()) {
      in.film_batch = batch_, in.film_rows = static_cast<int>(plan_.film_rows), in.film = film_.mutable_data_ptr();
      in.film_step = film[0].const_data_ptr(), in.film_cond = film[1].const_data_ptr();
    }
    C10_CUDA_CHECK(rows::prepare(in, stream_));
    return out.defined() ? out.transpose(1, 2) : out;
  }

  /// Of the sinusoids, between the two layers.
  Tensor hidden() const {
    return activate(dense(embedding_, plan_.time[0]), Tensor(), embedding_.size(0),
                    gemm::padded(plan_.shapes[plan_.time[0].weight][0]));
  }
  /// Rows of FiLM's parameters of every block.
  Tensor film_of(const Tensor& x, const void* bias) const {
    return dense(x, x.size(1), plan_.film_rows, plan_.film_packed, bias, dtype_);
  }
  void modulate(const Tensor& global_cond) {
    const auto cond = global_cond.defined() ? as_input(global_cond) : Tensor();
    film_ = film_of(
        activate(dense(hidden(), plan_.time[1]), cond, batch_, gemm::padded_to_lines(plan_.step_dim + plan_.cond_dim)),
        packed(plan_.film_bias));
  }

  /// `skip`: further channels of the input, or undefined.
  Activation block(const Activation& input, const Activation& more = {}) {
    const Tensor &x = input.values, &skip = more.values;
    const auto& b = plan_.blocks[next_block_];
    const auto get = [&](int i) { return b.parameters[i] < 0 ? Tensor() : parameter(b.parameters[i]); };
    const int64_t channels = plan_.shapes[b.parameters[0]][0];
    const int64_t shift_at = b.film + (plan_.film_scale ? channels : 0);
    const auto scale = plan_.film_scale ? film_.narrow(1, b.film, channels) : Tensor();
    const ResidualBlock block{{x, get(0), get(1), get(2), get(3), get(4), get(5), get(6), get(7), get(8), get(9), scale,
                               film_.narrow(1, shift_at, channels), skip},
                              plan_.num_groups,
                              kEps};
    const auto packed = packed_.narrow(0, b.packed, b.size);
    ++next_block_;
    if (halves_) return exact_block(block, b, input, more);
    if (auto out = residual_block1d_on_packed(block, packed); out.defined()) return {out, {}};
    // Without padded channels.
    const auto own = skip.defined() ? x : x.narrow(1, 0, plan_.shapes[b.parameters[0]][1]);
    return {residual_block1d(in_order(own, /*channels_last=*/true), get(0), get(1), get(2), get(3), get(4), get(5),
                             get(6), get(7), as_optional(get(8)), as_optional(get(9)), plan_.num_groups, kEps,
                             as_optional(scale), block.tensors[kShift], as_optional(skip)),
            {}};
  }

  /// In float32: a launch a convolution, and one a normalisation, which writes the halves that a convolution reads.
  Activation exact_block(const ResidualBlock& block, const BatchPlan::Block& b, const Activation& input,
                         const Activation& more) const {
    const auto x = operand(input), skip = more.values.defined() ? operand(more) : Tensor();
    const int64_t first = skip.defined() ? block[kInput].size(1) : 0, second = b.packed + packed_size(b.parameters[0]);
    const auto conv1 = exact_conv(x, skip, first, b.packed, block[kConv1Weight], block[kConv1Bias]);
    const auto activated = exact_norm(conv1, plan_.num_groups, block[kGn1Weight], block[kGn1Bias], block[kScale],
                                      block[kShift], Tensor(), Wanted::kHalves);
    auto residual = block[kInput];
    if (block[kResidualWeight].defined())
      residual = exact_conv(x, skip, first, second + packed_size(b.parameters[4]), block[kResidualWeight],
                            block[kResidualBias]);
    const auto conv2 = exact_conv(operand(activated), Tensor(), 0, second, block[kConv2Weight], block[kConv2Bias]);
    return exact_norm(conv2, plan_.num_groups, block[kGn2Weight], block[kGn2Bias], Tensor(), Tensor(), residual,
                      Wanted::kBoth);
  }
  Tensor final_block(const Activation& input) const {
    const Tensor& x = input.values;
    const auto& layer = plan_.final_conv;
    const auto &weight = parameter(layer.weight), &bias = parameter(layer.bias);
    const auto &gamma = parameter(plan_.final_norm[0]), &beta = parameter(plan_.final_norm[1]);
    const int64_t channels = weight.size(0);
    const int taps = static_cast<int>(weight.size(2)), group = static_cast<int>(channels / kFinalGroups);
    if (halves_)
      return exact_norm(exact_conv(operand(input), Tensor(), 0, layer.packed, weight, bias), kFinalGroups, gamma, beta,
                        Tensor(), Tensor(), Tensor(), Wanted::kValues)
          .values;
    const gemm::Conv1d conv{dtype_,   batch_, x.size(2), channels, x.size(2),
                            channels, taps,   1,         taps / 2, /*alone=*/true};
    if (!gemm::serves(conv) || !gemm::normalises(conv, group))
      return conv1d_gnm(x, weight, bias, gamma, beta, kFinalGroups, kEps, std::nullopt, std::nullopt, std::nullopt);
    auto out = empty_in_order(batch_, channels, x.size(2), /*channels_last=*/true, packed_.options());
    gemm::Normalisation norm{};
    norm.group = group, norm.eps = kEps, norm.parameter_dtype = parameter_dtype_;
    norm.weight = gamma.const_data_ptr(), norm.bias = beta.const_data_ptr(), norm.out = out.mutable_data_ptr();
    const auto own = workspace(gemm::fprop_workspace(conv, group), out);
    C10_CUDA_CHECK(gemm::fprop_normalised(conv, {x.const_data_ptr()}, weights(layer.packed),
                                          {bias.const_data_ptr(), parameter_dtype_, {}}, nullptr, norm, {},
                                          mutable_data_or_null(own), stream_));
    return out;
  }

  /// The 1x1 convolution to the actions: (B, T, A) of `dtype`, float32 or that of the activations.
  Tensor last(const Tensor& x, at::ScalarType dtype) const {
    const auto& shape = plan_.shapes[plan_.last.weight];
    const void* bias = parameter(plan_.last.bias).const_data_ptr();
    static_assert(kMostActions == rows::kMaxActions);
    if (shape[0] <= kMostActions) {
      auto out = at::empty({batch_, length_, shape[0]}, packed_.options().dtype(dtype));
      C10_CUDA_CHECK(rows::to_actions(
          {dtype_, parameter_dtype_, x.const_data_ptr(), packed(plan_.last.packed), bias, out.mutable_data_ptr(),
           batch_ * length_, static_cast<int>(shape[1]), static_cast<int>(shape[0]), dtype == at::kFloat},
          stream_));
      return out;
    }
    auto out = empty({batch_, length_, shape[0]});
    const gemm::Conv1d conv{dtype_, batch_, length_, shape[0], length_, shape[1], 1, 1, 0, /*alone=*/true};
    multiply(/*dgrad=*/false, conv, operand(x), plan_.last, out);
    return out.to(dtype);
  }

  int64_t length_ = 0;
  size_t next_block_ = 0;
  Tensor embedding_, film_, local_;
};

Tensor unet1d_batch_pack_cuda(at::TensorList parameters, at::IntArrayRef config, at::ScalarType dtype) {
  const auto plan = unet1d_batch_plan("unet1d_batch_pack", config);
  check_unet1d_batch_parameters("unet1d_batch_pack", *plan, parameters, dtype);
  const c10::cuda::CUDAGuard guard(parameters[0].device());
  auto packed = at::empty({plan->elements}, parameters[0].options().dtype(dtype));
  packed.narrow(0, plan->weights, plan->elements - plan->weights).zero_();
  pack_batch_weights(*plan, parameters, Tensor(), packed);
  return packed;
}

void unet1d_batch_pack_out_cuda(at::TensorList parameters, at::IntArrayRef config, at::ScalarType dtype,
                                const OptionalTensor& seen, Tensor& out) {
  const auto plan = unet1d_batch_plan("unet1d_batch_pack", config);
  check_unet1d_batch_pack_out(*plan, parameters, dtype, seen, out);
  const c10::cuda::CUDAGuard guard(out.device());
  pack_batch_weights(*plan, parameters, value_or_undefined(seen), out);
}

/// Parameters and packed weights, aligned.
struct Kept {
  std::vector<Tensor> parameters;
  Tensor packed;
  Kept(at::TensorList given, const Tensor& weights) : packed(aligned(weights)) {
    for (const auto& parameter : given) parameters.push_back(aligned(parameter.contiguous()));
  }
};

void check_gpu(const char* op, const char* name, const Tensor& given) {
  DPA_CHECK(gemm::supported(), op, c10::str(name, " must be on a GPU of compute capability 8.0 or later"),
            given.device());
}

Tensor unet1d_batch_cuda(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                         at::TensorList parameters, const Tensor& packed, at::IntArrayRef config,
                         const OptionalTensor& local) {
  const auto plan = unet1d_batch_plan("unet1d_batch", config);
  check_unet1d_batch(*plan, sample, timesteps, global_cond, parameters, packed, local);
  const c10::cuda::CUDAGuard guard(sample.device());
  check_gpu("unet1d_batch", "sample", sample);
  if (sample.numel() == 0) return at::empty(sample.sizes(), packed.options());
  const Kept kept(parameters, packed);
  return Forward(*plan, kept.parameters, kept.packed, local).run(sample, timesteps, value_or_undefined(global_cond));
}

std::tuple<Tensor, Tensor> unet1d_batch_film_cuda(const Tensor& timesteps, const OptionalTensor& global_cond,
                                                  at::TensorList parameters, const Tensor& packed,
                                                  at::IntArrayRef config) {
  const auto plan = unet1d_batch_plan("unet1d_batch_film", config);
  check_unet1d_batch_film(*plan, timesteps, global_cond, parameters, packed);
  const c10::cuda::CUDAGuard guard(timesteps.device());
  check_gpu("unet1d_batch_film", "timesteps", timesteps);
  const int64_t batch = global_cond.has_value() ? global_cond->size(0) : 0;
  if (timesteps.numel() == 0 || (global_cond.has_value() && batch == 0))
    return {at::zeros({timesteps.size(0), plan->film_rows}, packed.options()),
            at::zeros({batch, plan->film_rows}, packed.options())};
  const Kept kept(parameters, packed);
  const auto parts = Forward(*plan, kept.parameters, kept.packed).film(timesteps, value_or_undefined(global_cond));
  return {parts[0], parts[1].defined() ? parts[1] : at::empty({0, plan->film_rows}, packed.options())};
}

Tensor unet1d_batch_on_film_cuda(const Tensor& sample, const Tensor& step, const Tensor& cond,
                                 at::TensorList parameters, const Tensor& packed, at::IntArrayRef config,
                                 const OptionalTensor& local) {
  const auto plan = unet1d_batch_plan("unet1d_batch_on_film", config);
  check_unet1d_batch_on_film(*plan, sample, step, cond, parameters, packed, local);
  const c10::cuda::CUDAGuard guard(sample.device());
  check_gpu("unet1d_batch_on_film", "sample", sample);
  if (sample.numel() == 0) return at::empty(sample.sizes(), packed.options().dtype(at::kFloat));
  const Kept kept(parameters, packed);
  const auto of_samples = plan->cond_dim > 0 ? aligned(cond.contiguous()) : Tensor();
  return Forward(*plan, kept.parameters, kept.packed, local)
      .run_on_film(sample, aligned(step.contiguous()), of_samples);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("unet1d_batch", &unet1d_batch_cuda);
  m.impl("unet1d_batch_film", &unet1d_batch_film_cuda);
  m.impl("unet1d_batch_on_film", &unet1d_batch_on_film_cuda);
  m.impl("unet1d_batch_pack", &unet1d_batch_pack_cuda);
  m.impl("unet1d_batch_pack.out", &unet1d_batch_pack_out_cuda);
}

}  // namespace dpa::unet1d_batch
