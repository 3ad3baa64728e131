#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common/strides.h"
#include "ops/conv1d/conv1d.h"

namespace dpa {
namespace {

/// PyTorch's convolutions add in the input's dtype where that is float16: they get such values in float32.
Tensor summable(const Tensor& tensor, const Tensor& input) {
  return input.scalar_type() == at::kHalf ? tensor.to(at::kHalf).to(at::kFloat) : tensor;
}
OptionalTensor summable(const OptionalTensor& tensor, const Tensor& input) {
  return tensor.has_value() ? OptionalTensor(summable(*tensor, input)) : std::nullopt;
}

Tensor conv1d_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride,
                  int64_t padding, bool transposed) {
  check_conv1d("conv1d", input, weight, bias, stride, padding, transposed);
  const auto out = conv1d_formula(summable(input, input), summable(weight, input), summable(bias, input), stride,
                                  padding, transposed);
  return in_order(out.to(input.scalar_type()), is_channels_last(input));
}

Conv1dForward conv1d_forward_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride,
                                 int64_t padding, bool transposed) {
  return {conv1d_cpu(input, weight, bias, stride, padding, transposed), at::empty({0}, input.options())};
}

Conv1dGradients conv1d_backward_cpu(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                    const OptionalTensor& bias, const Tensor& packed, int64_t stride, int64_t padding,
                                    bool transposed, Conv1dMask mask) {
  check_conv1d("conv1d", input, weight, bias, stride, padding, transposed);
  check_conv1d_grad(grad, input, weight, stride, padding, transposed);
  check_conv1d_packed(packed, input, weight);
  auto [grad_input, grad_weight, grad_bias] =
      conv1d_backward_formula(summable(grad, input), summable(input, input), summable(weight, input),
                              summable(bias, input), stride, padding, transposed, mask);
  if (mask[0]) grad_input = in_order(grad_input.to(input.scalar_type()), is_channels_last(input));
  if (mask[1]) grad_weight = grad_weight.to(weight.scalar_type()).contiguous();
  if (mask[2] && bias.has_value()) grad_bias = grad_bias.to(bias->scalar_type());
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("conv1d", &conv1d_cpu);
  m.impl("conv1d_forward", &conv1d_forward_cpu);
  m.impl("conv1d_backward", &conv1d_backward_cpu);
}

}  // namespace dpa
