#include "ops/common/cuda.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "kernels/cuda/conv1d/conv1d.h"
#include "kernels/plans/conv1d/plan.h"
#include "ops/conv1d/conv1d.h"
#include "ops/conv1d/gemm.h"
#include "ops/joint_linear/joint_linear.h"
#include "ops/pack_ahead/pack_ahead.h"

namespace dpa {
namespace {

/// (N, C) as one sample of length N, which is channels-last in memory.
Tensor as_sample(const Tensor& rows) { return rows.t().unsqueeze(0); }

/// One convolution with one tap, whose time is the batch, of as many of the input's channels.
gemm::Conv1d geometry(const Tensor& input, int64_t channels, int64_t outputs) {
  const int64_t batch = input.size(0);
  return {kernel_dtype(input.scalar_type()),
          1,
          batch,
          outputs,
          batch,
          channels,
          /*taps=*/1,
          /*stride=*/1,
          /*padding=*/0};
}

bool serves(const Tensor& input, at::TensorList weights, const gemm::Conv1d& conv) {
  return conv1d_packs(as_sample(input), weights[0].unsqueeze(2), 1, 0) && gemm::takes(conv);
}

/// Neighbouring channels of the input.
struct Channels {
  int64_t first, count;
};

int64_t packed_bytes(const Channels& channels, int64_t outputs) { return outputs * gemm::padded(channels.count) * 2; }

/// Every weight's rows at their place among all rows, in the input's dtype: (sum of C_i, channels padded).
void pack(const Tensor& input, at::TensorList weights_, const Channels& channels, void* packed) {
  const int64_t width = gemm::padded(channels.count);
  std::vector<Tensor> weights;
  for (const auto& weight : weights_) weights.push_back(weight.contiguous());
  gemm::Packings packings{};
  auto* to = static_cast<uint16_t*>(packed);
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto& weight = weights[i];
    if (weight.size(0) > 0)
      packings.each[packings.count++] = {
          static_cast<const char*>(weight.const_data_ptr()) + channels.first * weight.element_size(),
          to,
          weight.size(0),
          channels.count,
          /*taps=*/1,
          /*width=*/0,
          /*of=*/weight.size(1)};
    to += weight.size(0) * width;
    if (packings.count < gemm::kMaxPackings && i + 1 < weights.size()) continue;
    if (packings.count > 0)
      C10_CUDA_CHECK(gemm::pack_weights(kernel_dtype(weight.scalar_type()), kernel_dtype(input.scalar_type()), packings,
                                        c10::cuda::getCurrentCUDAStream()));
    packings.count = 0;
  }
}

/// The whole input, or its Mish, as the GEMMs read it. What is not the input itself is written by a kernel of `write`'s
/// stream.
struct WholeRows {
  Tensor input, rest, rows;
  bool mish;

  WholeRows(const Tensor& input_, const OptionalTensor& rest_, bool mish) : mish(mish) {
    if (!rest_.has_value() && !mish) {
      rows = padded_rows(as_sample(input_));
      return;
    }
    input = input_.contiguous();
    if (rest_.has_value()) rest = rest_->contiguous();
    rows = at::empty({input.size(0), gemm::padded(input.size(1) + more())}, input.options());
  }
  void write(c10::cuda::CUDAStream stream) const {
    if (!input.defined()) return;
    C10_CUDA_CHECK(gemm::join_rows(kernel_dtype(input.scalar_type()), input.const_data_ptr(), input.size(1),
                                   data_or_null(rest), more(), input.size(0), rows.mutable_data_ptr(), stream, mish));
  }

 private:
  int64_t more() const { return rest.defined() ? rest.size(1) : 0; }
};

/// Of mish(x) at `x`, which is contiguous, times a gradient, in its place.
void times_slope(const Tensor& x, const Tensor& grad) {
  C10_CUDA_CHECK(gemm::times_mish_slope(kernel_dtype(grad.scalar_type()), x.const_data_ptr(), grad.numel(),
                                        grad.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream()));
}

/// One after the other; in a graph beside the kernels of the main stream, until `branch` joins.
Tensor joined(at::TensorList biases, Branches& branch) {
  if (biases.size() == 1) return aligned(biases[0].contiguous());
  int64_t count = 0;
  for (const auto& bias : biases) count += bias.size(0);
  auto out = at::empty({count}, biases[0].options());
  branch.fork();
  const c10::cuda::CUDAStreamGuard guard(branch.side());
  at::cat_out(out, biases);
  return out;
}

Tensor joint_linear_cuda(const Tensor& input, at::TensorList weights, at::TensorList biases, const OptionalTensor& rest,
                         bool mish) {
  check_joint_linear(input, weights, biases, rest);
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t channels = weights[0].size(1), outputs = joint_outputs(weights).expect_int();
  const auto conv = geometry(input, channels, outputs);
  auto packed = packed_ahead(weights, input.scalar_type())[0];
  if (!serves(input, weights, conv)) return joint_linear_formula(input, weights, biases, rest, mish);
  const Channels all{0, channels};
  if (!packed.defined()) {
    packed = at::empty({packed_bytes(all, outputs)}, input.options().dtype(at::kByte));
    pack(input, weights, all, packed.mutable_data_ptr());
  }
  const WholeRows x(input, rest, mish);
  Branches branch;
  const auto bias = joined(biases, branch);
  x.write(branch.main());
  auto out = at::empty({input.size(0), outputs}, input.options());
  if (biases.size() > 1) branch.join();
  const auto own =
      convolve(/*dgrad=*/false, conv, {x.rows.const_data_ptr()}, {packed.const_data_ptr(), /*prefetchable=*/false},
               {bias.const_data_ptr(), kernel_dtype(bias.scalar_type()), {}}, out);
  return out;
}

/// In a graph the gradients of weights and biases are made beside that of the input, which the timestep embedding waits
/// for: it comes first, and before the branches that are left are joined. Called, packed weights have gone before the
/// weights' gradient is allocated: this is the end of a training step, where its memory is fullest.
JointLinearGradients joint_linear_backward_cuda(const Tensor& grad, const Tensor& input, at::TensorList weights,
                                                at::TensorList biases, const OptionalTensor& rest, JointLinearMask mask,
                                                bool mish) {
  check_joint_linear(input, weights, biases, rest);
  check_joint_linear_grad(grad, input, weights);
  const c10::cuda::CUDAGuard guard(input.device());
  const bool later = joins_later(grad, 1, 1 + 2 * weights.size());
  const int64_t channels = weights[0].size(1), own = input.size(1), outputs = joint_outputs(weights).expect_int();
  const auto conv = geometry(input, channels, outputs);
  if (!serves(input, weights, conv))
    return joint_linear_backward_formula(grad, input, weights, biases, rest, mask, mish);
  const auto g = padded_rows(as_sample(grad));
  const bool of_rest = mask[3] && rest.has_value();
  const Channels wanted{mask[0] ? 0 : own, (mask[0] ? own : 0) + (of_rest ? channels - own : 0)};
  Tensor packed, between, grad_whole;
  if (mask[0] || of_rest) grad_whole = at::empty({input.size(0), wanted.count}, input.options());
  if (wanted.count > 0) {
    packed = at::empty({packed_bytes(wanted, outputs)}, input.options().dtype(at::kByte));
    pack(input, weights, wanted, packed.mutable_data_ptr());
  }
  std::optional<WholeRows> x;
  if (mask[1]) x.emplace(input, rest, mish);
  // Of any strides, unlike the input. A copy lives until the end: its memory could else go to what the side stream writes
  // while the slopes are read.
  const auto others = mish && of_rest ? rest->contiguous() : Tensor();
  Branches branches;
  branches.fork();
  if (mask[1]) x->write(branches.side());
  if (wanted.count > 0)
    between = input_backward(geometry(input, wanted.count, outputs), /*transposed=*/false, g,
                             {packed.const_data_ptr(), /*prefetchable=*/false}, grad_whole);
  if (!branches.apart()) packed.reset(), between.reset();
  const auto part = [&](int64_t first, int64_t count) {
    return grad_whole.size(1) == count ? grad_whole
                                       : grad_whole.narrow(1, first, count).clone(at::MemoryFormat::Contiguous);
  };
  Tensor grad_input, grad_rest;
  if (mask[0]) grad_input = part(0, own);
  if (of_rest) grad_rest = part(wanted.count - (channels - own), channels - own);
  if (mish && mask[0]) times_slope(input, grad_input);
  if (mish && of_rest) times_slope(others, grad_rest);
  if (weights.size() > 1)
    Unjoined::join(branches.side());  // and give its memory back: this op's is the most of the pass
  const auto grad_weight = mask[1] ? at::empty({outputs, channels}, weights[0].options()) : Tensor();
  const auto grad_bias = mask[2] ? at::empty({outputs}, biases[0].options()) : Tensor();
  const auto workspace =
      parameter_backward(conv, /*transposed=*/false, g, x ? x->rows : Tensor(), grad_weight, grad_bias, branches);
  if (later)
    Unjoined::hold(branches, {g, x ? x->input : Tensor(), x ? x->rest : Tensor(), x ? x->rows : Tensor(), workspace},
                   {grad_weight, grad_bias});
  else
    branches.join();
  return {grad_input, grad_weight, grad_bias, grad_rest};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("joint_linear", &joint_linear_cuda);
  m.impl("joint_linear_backward", &joint_linear_backward_cuda);
}

}  // namespace dpa
