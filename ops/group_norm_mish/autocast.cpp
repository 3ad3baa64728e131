// Under autocast the tensors come in the region's 16-bit dtype; statistics are float32 inside the kernels anyway.
// Beside channels-last activations weight and bias stay float32, because those kernels take them so and casts are
// launches.
#include "ops/common/autocast.h"

#include <torch/library.h>

#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

template <at::DeviceType Device>
Tensor group_norm_mish_autocast(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                                const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                                const OptionalTensor& shift, const OptionalTensor& residual) {
  const Autocast cast(Device);
  const auto x = cast(input);
  const auto parameter = [&](const OptionalTensor& tensor) {
    const bool stays = tensor.has_value() && tensor->scalar_type() == at::kFloat && is_channels_last(x);
    return stays ? tensor : cast(tensor);
  };
  return group_norm_mish(x, num_groups, parameter(weight), parameter(bias), eps, cast(scale), cast(shift),
                         cast(residual));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, AutocastCPU, m) { m.impl("group_norm_mish", &group_norm_mish_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(dpa, AutocastCUDA, m) { m.impl("group_norm_mish", &group_norm_mish_autocast<at::kCUDA>); }

}  // namespace dpa
