#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common/strides.h"
#include "ops/conv1d/conv1d.h"

namespace dpa {
namespace {

Tensor conv1d_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride,
                  int64_t padding, bool transposed) {
  check_conv1d("conv1d", input, weight, bias, stride, padding, transposed);
  return in_order(conv1d_formula(input, weight, bias, stride, padding, transposed), is_channels_last(input));
}

Conv1dForward conv1d_forward_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride,
                                 int64_t padding, bool transposed) {
  return {conv1d_cpu(input, weight, bias, stride, padding, transposed), at::empty({0}, input.options())};
}

Conv1dGradients conv1d_backward_cpu(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                    const OptionalTensor& bias, const Tensor&, int64_t stride, int64_t padding,
                                    bool transposed, Conv1dMask mask) {
  check_conv1d("conv1d", input, weight, bias, stride, padding, transposed);
  check_conv1d_grad(grad, input, weight, stride, padding, transposed);
  auto [grad_input, grad_weight, grad_bias] =
      conv1d_backward_formula(grad, input, weight, bias, stride, padding, transposed, mask);
  if (mask[0]) grad_input = in_order(grad_input, is_channels_last(input));
  if (mask[1]) grad_weight = grad_weight.contiguous();
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("conv1d", &conv1d_cpu);
  m.impl("conv1d_forward", &conv1d_forward_cpu);
  m.impl("conv1d_backward", &conv1d_backward_cpu);
}

}  // namespace dpa
