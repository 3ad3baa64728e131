// Under autocast the tensors come in the region's 16-bit dtype; statistics are float32 inside the kernels anyway.
#include "ops/common/autocast.h"

#include <torch/library.h>

#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

template <at::DeviceType Device>
Tensor group_norm_mish_autocast(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                                const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                                const OptionalTensor& shift) {
  const Autocast cast(Device);
  return group_norm_mish(cast(input), num_groups, cast(weight), cast(bias), eps, cast(scale), cast(shift));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, AutocastCPU, m) { m.impl("group_norm_mish", &group_norm_mish_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(dpa, AutocastCUDA, m) { m.impl("group_norm_mish", &group_norm_mish_autocast<at::kCUDA>); }

}  // namespace dpa
