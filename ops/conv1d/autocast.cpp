// Under autocast the input comes in the region's 16-bit dtype. Parameters stay as they are: the products cast them
// while they lay them out, and their gradients come back in the parameters' own precision.
#include "ops/common/autocast.h"

#include <torch/library.h>

#include "ops/conv1d/conv1d.h"

namespace dpa {
namespace {

template <at::DeviceType Device>
Tensor conv1d_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride,
                       int64_t padding, bool transposed) {
  const Autocast cast(Device);
  const auto narrow = cast(input);
  return conv1d(narrow, cast.parameter(weight, narrow), cast.parameter(bias, narrow), stride, padding, transposed);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, AutocastCPU, m) { m.impl("conv1d", &conv1d_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(dpa, AutocastCUDA, m) { m.impl("conv1d", &conv1d_autocast<at::kCUDA>); }

}  // namespace dpa
