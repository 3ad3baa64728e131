// Under autocast the cell comes in the region's 16-bit dtype, as PyTorch's own recurrent cells do.
#include "ops/common/autocast.h"

#include <torch/library.h>

#include "ops/lltm/lltm.h"

namespace dpa {
namespace {

template <at::DeviceType Device>
LltmState lltm_autocast(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                        const Tensor& old_cell) {
  const Autocast cast(Device);
  return lltm(cast(input), cast(weights), cast(bias), cast(old_h), cast(old_cell));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, AutocastCPU, m) { m.impl("lltm", &lltm_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(dpa, AutocastCUDA, m) { m.impl("lltm", &lltm_autocast<at::kCUDA>); }

}  // namespace dpa
