// Where a gradient or a tangent is wanted, the op is the convolution followed by group_norm_mish, each of which
// brings its own derivatives; the convolution's output has to be saved for them in any case.
#include <torch/library.h>

#include "ops/common/autocast.h"
#include "ops/common/node.h"
#include "ops/conv1d/conv1d.h"
#include "ops/conv1d_gnm/conv1d_gnm.h"
#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

Tensor conv1d_gnm_formula(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                          const OptionalTensor& gn_weight, const OptionalTensor& gn_bias, int64_t num_groups,
                          double eps, const OptionalTensor& scale, const OptionalTensor& shift,
                          const OptionalTensor& residual) {
  check_conv1d_gnm(input, conv_weight, conv_bias, gn_weight, gn_bias, num_groups, eps, scale, shift, residual);
  return group_norm_mish(conv1d(input, conv_weight, conv_bias, 1, conv_padding(conv_weight), /*transposed=*/false),
                         num_groups, gn_weight, gn_bias, eps, scale, shift, residual);
}

/// Under autocast the activations come in the region's 16-bit dtype; parameters stay float32, as the two ops take them.
Tensor conv1d_gnm_autocast(const Autocast& cast, const Tensor& input, const Tensor& conv_weight,
                           const OptionalTensor& conv_bias, const OptionalTensor& gn_weight,
                           const OptionalTensor& gn_bias, int64_t num_groups, double eps, const OptionalTensor& scale,
                           const OptionalTensor& shift, const OptionalTensor& residual) {
  const auto narrow = cast(input);
  return conv1d_gnm(narrow, cast.parameter(conv_weight, narrow), cast.parameter(conv_bias, narrow),
                    cast.parameter(gn_weight, narrow), cast.parameter(gn_bias, narrow), num_groups, eps, cast(scale),
                    cast(shift), cast(residual));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) { m.impl("conv1d_gnm", formula_autograd<conv1d_gnm, &conv1d_gnm_formula>); }

DPA_AUTOCAST(conv1d_gnm, With<conv1d_gnm_autocast>)

}  // namespace dpa
