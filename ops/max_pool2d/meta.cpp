#include "ops/common/meta.h"

#include <torch/library.h>

#include "ops/common/strides.h"
#include "ops/max_pool2d/max_pool2d.h"

namespace dpa {
namespace {

Tensor pooled(const Tensor& input, int64_t kernel_size, int64_t stride, int64_t padding,
              const at::TensorOptions& options) {
  return empty_image(input.sym_size(0), input.sym_size(1), windows(input.sym_size(2), kernel_size, stride, padding),
                     windows(input.sym_size(3), kernel_size, stride, padding), is_channels_last_image(input), options);
}

Tensor max_pool2d_meta(const Tensor& input, int64_t kernel_size, int64_t stride, int64_t padding) {
  check_max_pool2d(input, kernel_size, stride, padding);
  return pooled(input, kernel_size, stride, padding, input.options());
}

MaxPool2dOutputs max_pool2d_forward_meta(const Tensor& input, int64_t kernel_size, int64_t stride, int64_t padding) {
  check_max_pool2d(input, kernel_size, stride, padding);
  return {pooled(input, kernel_size, stride, padding, input.options()),
          pooled(input, kernel_size, stride, padding, input.options().dtype(at::kByte))};
}

Tensor max_pool2d_backward_meta(const Tensor& grad, const Tensor& taps, const Tensor& input, int64_t kernel_size,
                                int64_t stride, int64_t padding) {
  check_max_pool2d_backward(grad, taps, input, kernel_size, stride, padding);
  return empty_image_like(input, is_channels_last_image(taps), input.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("max_pool2d", &max_pool2d_meta);
  m.impl("max_pool2d_forward", &max_pool2d_forward_meta);
  m.impl("max_pool2d_backward", &max_pool2d_backward_meta);
}

}  // namespace dpa
