#include <torch/library.h>

#include "ops/common/strides.h"
#include "ops/conv1d_gnm/conv1d_gnm.h"

namespace dpa {
namespace {

Tensor conv1d_gnm_meta(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                       const OptionalTensor& gn_weight, const OptionalTensor& gn_bias, int64_t num_groups, double eps,
                       const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual) {
  check_conv1d_gnm(input, conv_weight, conv_bias, gn_weight, gn_bias, num_groups, eps, scale, shift, residual);
  return empty_in_order(input.sym_size(0), conv_weight.sym_size(0), input.sym_size(2), is_channels_last(input),
                        input.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) { m.impl("conv1d_gnm", &conv1d_gnm_meta); }

}  // namespace dpa
