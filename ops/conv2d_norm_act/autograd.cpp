// Where a gradient or a tangent is wanted, the op is its formula.
#include <torch/library.h>

#include "ops/common/autocast.h"
#include "ops/common/node.h"
#include "ops/common/strides.h"
#include "ops/conv2d_norm_act/conv2d_norm_act.h"

namespace dpa {
namespace {

Tensor conv2d_norm_act_ordered(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual,
                               int64_t num_groups, double eps, int64_t stride, int64_t padding, bool relu) {
  const auto out =
      conv2d_norm_act_formula(input, weight, bias, scale, shift, residual, num_groups, eps, stride, padding, relu);
  // Views, without a memory format, which vmap does not take.
  if (is_channels_last_image(input)) return out.permute({0, 2, 3, 1}).contiguous().permute({0, 3, 1, 2});
  return out.contiguous();
}

/// Under autocast the activations come in the region's 16-bit dtype; parameters stay float32, as the op takes them.
Tensor conv2d_norm_act_autocast(const Autocast& cast, const Tensor& input, const Tensor& weight,
                                const OptionalTensor& bias, const OptionalTensor& scale, const OptionalTensor& shift,
                                const OptionalTensor& residual, int64_t num_groups, double eps, int64_t stride,
                                int64_t padding, bool relu) {
  const auto narrow = cast(input);
  return conv2d_norm_act(narrow, cast.parameter(weight, narrow), cast.parameter(bias, narrow),
                         cast.parameter(scale, narrow), cast.parameter(shift, narrow), cast(residual), num_groups, eps,
                         stride, padding, relu);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("conv2d_norm_act", formula_autograd<conv2d_norm_act, &conv2d_norm_act_ordered>);
}

DPA_AUTOCAST(conv2d_norm_act, With<conv2d_norm_act_autocast>)

}  // namespace dpa
