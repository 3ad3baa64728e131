// Under autocast the activations come in the region's 16-bit dtype; parameters stay as they are.
#include "ops/common/autocast.h"

#include <torch/library.h>

#include "ops/residual_block1d/residual_block1d.h"

namespace dpa {
namespace {

template <at::DeviceType Device>
Tensor residual_block1d_autocast(DPA_BLOCK_PARAMETERS) {
  const Autocast cast(Device);
  const auto x = cast(input);
  const auto keep = [&](const auto& parameter) { return cast.parameter(parameter, x); };
  return residual_block1d(x, keep(conv1_weight), keep(conv1_bias), keep(gn1_weight), keep(gn1_bias), keep(conv2_weight),
                          keep(conv2_bias), keep(gn2_weight), keep(gn2_bias), keep(residual_weight),
                          keep(residual_bias), num_groups, eps, cast(scale), cast(shift));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, AutocastCPU, m) { m.impl("residual_block1d", &residual_block1d_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(dpa, AutocastCUDA, m) { m.impl("residual_block1d", &residual_block1d_autocast<at::kCUDA>); }

}  // namespace dpa
