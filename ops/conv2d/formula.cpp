// `dpa::conv2d` and its backward in ATen ops: what forward-mode AD and second derivatives differentiate, and what runs
// wherever no kernel of the library does.
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>

#include "ops/common/strides.h"
#include "ops/conv2d/conv2d.h"

namespace dpa {
Tensor conv2d_formula(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding) {
  const auto type = input.scalar_type(), wide = conv2d_arithmetic(input);
  return at::convolution(input.to(wide), weight.to(type).to(wide), /*bias=*/{}, {stride, stride}, {padding, padding},
                         {1, 1}, /*transposed=*/false, {0, 0}, 1)
      .to(type);
}

Conv2dGradients conv2d_backward_formula(const Tensor& grad, const Tensor& input, const Tensor& weight, int64_t stride,
                                        int64_t padding, Conv2dMask mask) {
  const auto type = input.scalar_type(), wide = conv2d_arithmetic(input);
  auto [grad_input, grad_weight, none] = at::convolution_backward(
      grad.to(wide), input.to(wide), weight.to(type).to(wide), at::OptionalIntArrayRef(), {stride, stride},
      {padding, padding}, {1, 1}, /*transposed=*/false, {0, 0}, 1, {mask[0], mask[1], false});
  return {mask[0] ? grad_input.to(type) : Tensor(), mask[1] ? grad_weight.to(weight.scalar_type()) : Tensor()};
}

Tensor conv2d_by_aten(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding) {
  check_conv2d("conv2d", input, weight, stride, padding);
  return image_in_order(conv2d_formula(input, weight, stride, padding), conv2d_channels_last(input, weight));
}

Conv2dGradients conv2d_backward_by_aten(const Tensor& grad, const Tensor& input, const Tensor& weight, int64_t stride,
                                        int64_t padding, Conv2dMask mask) {
  check_conv2d_grad(grad, input, weight, stride, padding);
  auto [grad_input, grad_weight] = conv2d_backward_formula(grad, input, weight, stride, padding, mask);
  if (mask[0]) grad_input = image_in_order(grad_input, is_channels_last_image(input));
  if (mask[1]) grad_weight = image_in_order(grad_weight, is_channels_last_image(weight));
  return {grad_input, grad_weight};
}

}  // namespace dpa
