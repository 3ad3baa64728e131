#include "ops/common/autocast.h"

#include <torch/library.h>

#include "test/ops/own_op/swiglu.h"

namespace own {
namespace {

template <at::DeviceType Device>
constexpr auto autocast = &dpa::AutocastKernel<decltype(swiglu), dpa::InRegionType, Device>::call;

}  // namespace

TORCH_LIBRARY_IMPL(own, AutocastCPU, m) { m.impl("swiglu", autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(own, AutocastCUDA, m) { m.impl("swiglu", autocast<at::kCUDA>); }

}  // namespace own
