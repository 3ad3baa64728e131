#include "ops/common/cuda.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/cuda/conv1d/conv1d.h"
#include "kernels/plans/conv1d/plan.h"
#include "ops/common/strides.h"
#include "ops/conv1d/conv1d.h"
#include "ops/conv1d/gemm.h"
#include "ops/pack_ahead/pack_ahead.h"

namespace dpa {
namespace {

/// The convolution's sizes for the kernels: a Conv1d's forward is their fprop, a transposed one's their dgrad.
gemm::Conv1d geometry(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding, bool transposed) {
  const int64_t length = input.size(2), taps = weight.size(2);
  const int64_t out = conv1d_length(length, taps, stride, padding, transposed).expect_int();
  return {kernel_dtype(input.scalar_type()), input.size(0),  transposed ? length : out, weight.size(0),
          transposed ? out : length,         weight.size(1), static_cast<int>(taps),    static_cast<int>(stride),
          static_cast<int>(padding)};
}

/// As fprop reads it; or, of float32, as dgrad does.
Tensor pack(const Tensor& weight_, at::ScalarType type, bool transposed = false) {
  const auto weight = weight_.contiguous();
  const int64_t row = weight.size(transposed ? 0 : 1), rows = weight.size(transposed ? 1 : 0);
  const int64_t planes = weight_parts(weight, type) * weight.size(2);
  auto packed = at::empty({planes, rows, gemm::padded(row)}, weight.options().dtype(type));
  if (weight.numel() == 0) return packed;
  const gemm::Packings packings{{packing(weight, packed.mutable_data_ptr(), type)}, 1};
  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(transposed
                     ? gemm::pack_weights_transposed(packings, stream)
                     : gemm::pack_weights(kernel_dtype(weight.scalar_type()), kernel_dtype(type), packings, stream));
  return packed;
}

Tensor as_packed(const Tensor& elements, const Tensor& weight) {
  return elements.view({weight.size(2), weight.size(0), -1});
}

Conv1dForward conv1d_forward_cuda(const Tensor& input, const Tensor& weight, const OptionalTensor& bias_,
                                  int64_t stride, int64_t padding, bool transposed) {
  check_conv1d("conv1d", input, weight, bias_, stride, padding, transposed);
  const c10::cuda::CUDAGuard guard(input.device());
  const bool channels_last = is_channels_last(input);
  const auto type = input.scalar_type();
  const bool tf32 = conv1d_in_tf32(input, weight, stride, padding);
  const auto ahead = packed_ahead({weight}, type)[0];
  auto packed = !conv1d_packs(input, weight, stride, padding) ? at::empty({0}, input.options())
                : ahead.defined()                             ? as_packed(ahead, weight)
                                                              : pack(weight, type);
  const bool packs = packed.dim() == 3 || tf32;
  auto conv = packs ? geometry(input, weight, stride, padding, transposed) : gemm::Conv1d{};
  // PyTorch's convolutions in float32 read vectors wherever a tensor begins.
  if (!packs || !gemm::takes(conv))
    return {
        in_order(conv1d_formula(aligned(input), aligned(weight), bias_, stride, padding, transposed), channels_last),
        packed};
  const auto x = padded_rows(input), bias = bias_.has_value() ? aligned(bias_->contiguous()) : Tensor();
  const gemm::Addends addends{data_or_null(bias), kernel_dtype((bias.defined() ? bias : input).scalar_type()), {}};
  const int64_t channels = weight.size(transposed ? 1 : 0);
  auto out = empty_in_order(input.size(0), channels, transposed ? conv.x_length : conv.y_length, channels_last,
                            input.options());
  conv.in_place = tf32 && reads_in_place(conv, weight);
  const auto weights = conv.in_place                    ? weight
                       : !tf32                          ? packed
                       : ahead.defined() && !transposed ? ahead
                                                        : pack(weight, type, transposed);
  const auto own = convolve(/*dgrad=*/transposed, conv, {x.const_data_ptr()},
                            {weights.const_data_ptr(), /*prefetchable=*/false}, addends, out);
  return {out, packed};
}

Tensor conv1d_cuda(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride,
                   int64_t padding, bool transposed) {
  return std::get<0>(conv1d_forward_cuda(input, weight, bias, stride, padding, transposed));
}

Conv1dGradients conv1d_backward_cuda(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                     const OptionalTensor& bias, const Tensor& packed_, int64_t stride, int64_t padding,
                                     bool transposed, Conv1dMask mask) {
  check_conv1d("conv1d", input, weight, bias, stride, padding, transposed);
  check_conv1d_grad(grad, input, weight, stride, padding, transposed);
  check_conv1d_packed(packed_, input, weight);
  const c10::cuda::CUDAGuard guard(input.device());
  const bool later = joins_later(grad, 1, 3);
  // The forward says whether it packed. Hooks on saved tensors may bring back other strides and alignments.
  const auto packed = aligned(packed_.contiguous());
  const bool tf32 = packed.dim() != 3 && conv1d_in_tf32(input, weight, stride, padding);
  const bool packs = (packed.dim() == 3 && stride <= 2 && padding < gemm::kMaxTaps) || tf32;
  auto conv = packs ? geometry(input, weight, stride, padding, transposed) : gemm::Conv1d{};
  if (!packs || !gemm::takes(conv)) {
    auto [grad_input, grad_weight, grad_bias] = conv1d_backward_formula(aligned(grad), aligned(input), aligned(weight),
                                                                        bias, stride, padding, transposed, mask);
    if (mask[0]) grad_input = in_order(grad_input, is_channels_last(input));
    if (mask[1]) grad_weight = grad_weight.contiguous();
    return {grad_input, grad_weight, grad_bias};
  }
  const auto g = padded_rows(grad), x = mask[1] ? padded_rows(input) : Tensor();
  Tensor grad_input, grad_weight, grad_bias;
  if (mask[0])
    grad_input = empty_in_order(input.size(0), input.size(1), input.size(2), /*channels_last=*/true, input.options());
  if (mask[1]) grad_weight = at::empty(weight.sizes(), weight.options());
  if (mask[2]) grad_bias = at::empty({weight.size(transposed ? 1 : 0)}, (bias.has_value() ? *bias : weight).options());
  // It lives until the end: a copy's memory could else go to what the side stream writes while it is packed.
  const auto plain = tf32 && mask[0] ? weight.contiguous() : Tensor();
  Branches branches;
  branches.fork();
  conv.in_place = plain.defined() && reads_in_place(conv, plain);
  const auto weights = conv.in_place ? plain : plain.defined() ? pack(plain, input.scalar_type(), !transposed) : packed;
  Tensor own;
  if (mask[0])
    own = input_backward(conv, transposed, g, {weights.const_data_ptr(), /*prefetchable=*/!tf32}, grad_input);
  const auto workspace = parameter_backward(conv, transposed, g, x, grad_weight, grad_bias, branches);
  if (later)
    Unjoined::hold(branches, {g, x, workspace}, {grad_weight, grad_bias});
  else
    branches.join();
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("conv1d", &conv1d_cuda);
  m.impl("conv1d_forward", &conv1d_forward_cuda);
  m.impl("conv1d_backward", &conv1d_backward_cuda);
}

}  // namespace dpa
