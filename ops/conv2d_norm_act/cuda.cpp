// On a GPU the op is cuDNN's convolution and ATen's normalisation, channels-last where the input is.
#include <torch/library.h>

#include "ops/common/strides.h"
#include "ops/conv2d_norm_act/conv2d_norm_act.h"

namespace dpa {
namespace {

Tensor conv2d_norm_act_cuda(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual,
                            int64_t num_groups, double eps, int64_t stride, int64_t padding, bool relu) {
  const auto out =
      conv2d_norm_act_formula(input, weight, bias, scale, shift, residual, num_groups, eps, stride, padding, relu);
  return image_in_order(out, is_channels_last_image(input));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) { m.impl("conv2d_norm_act", &conv2d_norm_act_cuda); }

}  // namespace dpa
