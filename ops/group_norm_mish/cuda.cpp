// Contiguous tensors of every dtype have kernels, and channels-last ones of 16 bits, or of float32 in TF32
// (kernels/cuda/group_norm_mish/). The rest, which no network's training meets, goes through contiguous copies.
#include "ops/common/cuda.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "kernels/cuda/common/clusters.h"
#include "kernels/cuda/conv1d/conv1d.h"
#include "kernels/cuda/group_norm_mish/group_norm_mish.h"
#include "ops/conv1d/conv1d.h"
#include "ops/group_norm_mish/channels_last.h"
#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

/// Keeps the contiguous copies alive beside the launcher's arguments.
struct Launch {
  Tensor input, weight, bias, scale, shift;
  kernels::GroupNormMish args;

  Launch(const Tensor& input_, int64_t num_groups, const OptionalTensor& weight_, const OptionalTensor& bias_,
         double eps, const OptionalTensor& scale_, const OptionalTensor& shift_, const Tensor& out) {
    const auto contiguous = [](const OptionalTensor& t) { return t.has_value() ? t->contiguous() : Tensor(); };
    input = input_.contiguous();
    weight = contiguous(weight_), bias = contiguous(bias_), scale = contiguous(scale_), shift = contiguous(shift_);
    const int64_t batch = input.size(0), channels = input.size(1);
    const int64_t inner = batch * channels > 0 ? input.numel() / (batch * channels) : 0;
    args = {kernel_dtype(input.scalar_type()),
            input.const_data_ptr(),
            data_or_null(weight),
            data_or_null(bias),
            data_or_null(scale),
            data_or_null(shift),
            mutable_data_or_null(out),
            batch,
            channels,
            inner,
            channels > 0 ? num_groups : 1,  // no channels make no groups, whatever number divides them
            eps};
  }
};

Tensor contiguous_forward(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                          const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                          const OptionalTensor& shift) {
  auto out = at::empty(input.sizes(), input.options());
  const Launch in(input, num_groups, weight, bias, eps, scale, shift, out);
  C10_CUDA_CHECK(kernels::group_norm_mish(in.args, c10::cuda::getCurrentCUDAStream()));
  return out;
}

NormGradients contiguous_backward(const Tensor& grad_, const Tensor& input, int64_t num_groups,
                                  const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                  const OptionalTensor& scale, const OptionalTensor& shift, NormMask mask) {
  const Launch in(input, num_groups, weight, bias, eps, scale, shift, Tensor());
  const auto grad = grad_.contiguous();
  const auto type = input.scalar_type();
  auto grad_input = mask[0] ? at::empty_like(in.input) : Tensor();
  auto sums = at::empty({4, input.size(0), input.size(1)}, input.options().dtype(accumulate_type(type)));
  const kernels::GroupNormMishBackward args{in.args, grad.const_data_ptr(), mutable_data_or_null(grad_input),
                                            sums.mutable_data_ptr()};
  C10_CUDA_CHECK(kernels::group_norm_mish_backward(args, c10::cuda::getCurrentCUDAStream()));
  const auto over_batch = [&](int i, int slot) { return mask[slot] ? sums.select(0, i).sum(0).to(type) : Tensor(); };
  const auto per_sample = [&](int i, int slot) {
    return mask[slot] ? sums.select(0, i).to(type, /*non_blocking=*/false, /*copy=*/true) : Tensor();
  };
  return {grad_input, over_batch(0, 1), over_batch(1, 2), per_sample(2, 3), per_sample(3, 4)};
}

/// The dtype in which the kernels take weight and bias: their own, or float32 where the two differ.
at::ScalarType parameter_type(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias) {
  const auto given = [&](const OptionalTensor& t) { return t.has_value() ? t->scalar_type() : input.scalar_type(); };
  if (!weight.has_value()) return given(bias);
  if (!bias.has_value() || given(weight) == given(bias)) return given(weight);
  return accumulate_type(input.scalar_type());
}

kernels::NormShape shape_of(const Tensor& input, int64_t num_groups) {
  return {input.size(0), input.size(1), input.size(2), num_groups};
}

/// A plan for the channels-last kernels where they serve, else one that does not fit. Float32 takes them where it is
/// convolved in TF32: they approximate Mish.
kernels::NormPlan channels_last_plan(const Tensor& input, int64_t num_groups) {
  if (!is_channels_last(input) || input.numel() == 0) return {};
  const bool tf32 = input.scalar_type() == at::kFloat && kernels::conv1d::supported() && convolves_in_tf32();
  if (input.element_size() != 2 && !tf32) return {};
  return kernels::teams(shape_of(input, num_groups), static_cast<int>(input.element_size()), kernels::has_clusters());
}

/// The arguments of the channels-last kernels, and the tensors that they point into.
struct ChannelsLast {
  at::ScalarType parameter;
  Tensor input, weight, bias, scale, shift;
  kernels::channels_last::GroupNormMish args;

  ChannelsLast(const kernels::NormPlan& plan, const Tensor& input_, int64_t num_groups, const OptionalTensor& weight_,
               const OptionalTensor& bias_, double eps, const OptionalTensor& scale_, const OptionalTensor& shift_)
      : parameter(parameter_type(input_, weight_, bias_)) {
    input = ordered(input_);
    weight = vector(weight_), bias = vector(bias_), scale = aligned_rows(value_or_undefined(scale_));
    shift = aligned_rows(value_or_undefined(shift_));
    args = norm_arguments(kernel_dtype(input_.scalar_type()), kernel_dtype(parameter), shape_of(input_, num_groups),
                          plan, eps, input, weight, bias, scale, shift);
  }
  /// A tensor of the input's shape as the kernels read it.
  static Tensor ordered(const Tensor& tensor) {
    const auto result = in_order(tensor, true);
    return is_aligned(result) ? result : empty(tensor).copy_(result);
  }
  static Tensor empty(const Tensor& like) {
    return empty_in_order(like.size(0), like.size(1), like.size(2), true, like.options());
  }

 private:
  Tensor vector(const OptionalTensor& tensor) const {
    return tensor.has_value() ? aligned(tensor->to(parameter).contiguous()) : Tensor();
  }
};

NormGradients channels_last_backward(const ChannelsLast& in, const Tensor& grad_, const OptionalTensor& weight,
                                     const OptionalTensor& bias, NormMask mask) {
  const auto grad = in.ordered(grad_);
  const auto options = in.input.options();
  const int64_t batch = in.input.size(0), channels = in.input.size(1);
  const auto wanted = [&](int i, at::IntArrayRef sizes, at::ScalarType type) {
    return mask[i] ? at::empty(sizes, options.dtype(type)) : Tensor();
  };
  auto grad_input = mask[0] ? in.empty(in.input) : Tensor();
  auto grad_weight = wanted(1, {channels}, in.parameter), grad_bias = wanted(2, {channels}, in.parameter);
  auto grad_scale = wanted(3, {batch, channels}, in.input.scalar_type());
  auto grad_shift = wanted(4, {batch, channels}, in.input.scalar_type());
  Tensor partials;
  if (mask[1] || mask[2])
    partials = at::empty({2, slices(in.args.shape, in.args.plan), channels}, options.dtype(at::kFloat));
  namespace norms = kernels::channels_last;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto* const sums = partials.defined() ? partials.mutable_data_ptr<float>() : nullptr;
  C10_CUDA_CHECK(norms::backward({in.args, grad.const_data_ptr(), mutable_data_or_null(grad_input),
                                  mutable_data_or_null(grad_scale), mutable_data_or_null(grad_shift), sums,
                                  /*early=*/false, /*sums=*/false},
                                 stream));
  if (partials.defined())
    C10_CUDA_CHECK(norms::add_slices({kernel_dtype(in.parameter),
                                      channels,
                                      partials.size(1),
                                      sums,
                                      2,
                                      {mutable_data_or_null(grad_weight), mutable_data_or_null(grad_bias)}},
                                     stream));
  if (mask[1]) grad_weight = grad_weight.to(weight->scalar_type());
  if (mask[2]) grad_bias = grad_bias.to(bias->scalar_type());
  return {grad_input, grad_weight, grad_bias, grad_scale, grad_shift};
}

OptionalTensor widened(const OptionalTensor& tensor) {
  return tensor.has_value() ? OptionalTensor(tensor->to(at::kFloat)) : std::nullopt;
}

/// Whether float32 parameters stand beside a 16-bit input, which the contiguous kernels do not take.
bool is_mixed(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias) {
  const auto differs = [&](const OptionalTensor& t) {
    return t.has_value() && t->scalar_type() != input.scalar_type();
  };
  return differs(weight) || differs(bias);
}

NormGradients group_norm_mish_backward_cuda(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                            const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                            const OptionalTensor& scale, const OptionalTensor& shift, NormMask mask) {
  check_group_norm_mish("group_norm_mish", input, num_groups, weight, bias, eps, scale, shift);
  check_same("group_norm_mish_backward", "grad", grad, "input", input);
  const c10::cuda::CUDAGuard guard(input.device());
  if (const auto plan = channels_last_plan(input, num_groups); plan.fits())
    return channels_last_backward({plan, input, num_groups, weight, bias, eps, scale, shift}, grad, weight, bias, mask);
  const bool mixed = is_mixed(input, weight, bias);
  auto [g0, g1, g2, g3, g4] =
      mixed ? contiguous_backward(grad.to(at::kFloat), input.to(at::kFloat), num_groups, widened(weight), widened(bias),
                                  eps, widened(scale), widened(shift), mask)
            : contiguous_backward(grad, input, num_groups, weight, bias, eps, scale, shift, mask);
  const auto type = input.scalar_type();
  if (mask[0]) g0 = in_order(g0.to(type), is_channels_last(input));
  if (mask[1]) g1 = g1.to(weight->scalar_type());
  if (mask[2]) g2 = g2.to(bias->scalar_type());
  if (mask[3]) g3 = g3.to(type);
  if (mask[4]) g4 = g4.to(type);
  return {g0, g1, g2, g3, g4};
}

Tensor checked_group_norm_mish_cuda(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                                    const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                                    const OptionalTensor& shift, const OptionalTensor& residual) {
  check_group_norm_mish("group_norm_mish", input, num_groups, weight, bias, eps, scale, shift, residual);
  return group_norm_mish_cuda(input, num_groups, weight, bias, eps, scale, shift, residual);
}

}  // namespace

Tensor group_norm_mish_cuda(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                            const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                            const OptionalTensor& shift, const OptionalTensor& residual) {
  const c10::cuda::CUDAGuard guard(input.device());
  if (const auto plan = channels_last_plan(input, num_groups); plan.fits()) {
    ChannelsLast in(plan, input, num_groups, weight, bias, eps, scale, shift);
    const auto added = residual.has_value() ? in.ordered(*residual) : Tensor();
    auto out = in.empty(input);
    in.args.residual = data_or_null(added);
    in.args.out = out.mutable_data_ptr();
    C10_CUDA_CHECK(kernels::channels_last::forward(in.args, c10::cuda::getCurrentCUDAStream()));
    return out;
  }
  // A residual is added before the one rounding, so a 16-bit sum is taken in float32.
  const bool wide = is_mixed(input, weight, bias) || (residual.has_value() && input.element_size() == 2);
  auto out = wide ? contiguous_forward(input.to(at::kFloat), num_groups, widened(weight), widened(bias), eps,
                                       widened(scale), widened(shift))
                  : contiguous_forward(input, num_groups, weight, bias, eps, scale, shift);
  if (residual.has_value()) out = out + residual->to(out.scalar_type());
  return in_order(out.to(input.scalar_type()), is_channels_last(input));
}

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("group_norm_mish", &checked_group_norm_mish_cuda);
  m.impl("group_norm_mish_backward", &group_norm_mish_backward_cuda);
}

}  // namespace dpa
