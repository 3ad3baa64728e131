#include "ops/common/autocast.h"

#include <torch/library.h>

#include "test/ops/own_op/swiglu.h"

namespace own {
namespace {

template <at::DeviceType Device>
Tensor swiglu_autocast(const Tensor& gate, const Tensor& value) {
  const dpa::Autocast cast(Device);  // autocast is off while it lives
  return swiglu(cast(gate), cast(value));
}

}  // namespace

TORCH_LIBRARY_IMPL(own, AutocastCPU, m) { m.impl("swiglu", &swiglu_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(own, AutocastCUDA, m) { m.impl("swiglu", &swiglu_autocast<at::kCUDA>); }

}  // namespace own
