#include <torch/library.h>

#include "ops/conv1d/conv1d.h"
#include "ops/conv1d_gnm/conv1d_gnm.h"
#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

Tensor conv1d_gnm_cpu(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                      const OptionalTensor& gn_weight, const OptionalTensor& gn_bias, int64_t num_groups, double eps,
                      const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual) {
  check_conv1d_gnm(input, conv_weight, conv_bias, gn_weight, gn_bias, num_groups, eps, scale, shift, residual);
  return group_norm_mish_cpu(conv1d(input, conv_weight, conv_bias, 1, conv_padding(conv_weight), /*transposed=*/false),
                             num_groups, gn_weight, gn_bias, eps, scale, shift, residual);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) { m.impl("conv1d_gnm", &conv1d_gnm_cpu); }

}  // namespace dpa
