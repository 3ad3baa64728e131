// Under autocast the activations come in the region's 16-bit dtype; parameters stay float32, as the two ops take them.
#include "ops/common/autocast.h"

#include <torch/library.h>

#include "ops/conv1d_gnm/conv1d_gnm.h"

namespace dpa {
namespace {

template <at::DeviceType Device>
Tensor conv1d_gnm_autocast(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                           const OptionalTensor& gn_weight, const OptionalTensor& gn_bias, int64_t num_groups,
                           double eps, const OptionalTensor& scale, const OptionalTensor& shift,
                           const OptionalTensor& residual) {
  const Autocast cast(Device);
  const auto narrow = cast(input);
  return conv1d_gnm(narrow, cast.parameter(conv_weight, narrow), cast.parameter(conv_bias, narrow),
                    cast.parameter(gn_weight, narrow), cast.parameter(gn_bias, narrow), num_groups, eps, cast(scale),
                    cast(shift), cast(residual));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, AutocastCPU, m) { m.impl("conv1d_gnm", &conv1d_gnm_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(dpa, AutocastCUDA, m) { m.impl("conv1d_gnm", &conv1d_gnm_autocast<at::kCUDA>); }

}  // namespace dpa
