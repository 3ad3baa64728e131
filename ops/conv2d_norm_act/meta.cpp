#include <torch/library.h>

#include "ops/common/strides.h"
#include "ops/conv2d_norm_act/conv2d_norm_act.h"

namespace dpa {
namespace {

Tensor conv2d_norm_act_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual,
                            int64_t num_groups, double eps, int64_t stride, int64_t padding, bool /*relu*/) {
  check_conv2d_norm_act(input, weight, bias, scale, shift, residual, num_groups, eps, stride, padding);
  const auto [batch, channels, height, width] = conv2d_sizes(input, weight, stride, padding);
  return empty_image(batch, channels, height, width, is_channels_last_image(input), input.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) { m.impl("conv2d_norm_act", &conv2d_norm_act_meta); }

}  // namespace dpa
