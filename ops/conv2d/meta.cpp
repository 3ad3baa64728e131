#include "ops/common/meta.h"

#include <torch/library.h>

#include "ops/common/strides.h"
#include "ops/conv2d/conv2d.h"

namespace dpa {
namespace {

Tensor conv2d_meta(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding) {
  check_conv2d("conv2d", input, weight, stride, padding);
  const auto [batch, channels, height, width] = conv2d_sizes(input, weight, stride, padding);
  return empty_image(batch, channels, height, width, conv2d_channels_last(input, weight), input.options());
}

Conv2dGradients conv2d_backward_meta(const Tensor& grad, const Tensor& input, const Tensor& weight, int64_t stride,
                                     int64_t padding, Conv2dMask mask) {
  check_conv2d_grad(grad, input, weight, stride, padding);
  const auto like = [](const Tensor& image) {
    return empty_image_like(image, is_channels_last_image(image), image.options());
  };
  return {mask[0] ? like(input) : Tensor(), mask[1] ? like(weight) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("conv2d", &conv2d_meta);
  m.impl("conv2d_backward", &conv2d_backward_meta);
}

}  // namespace dpa
