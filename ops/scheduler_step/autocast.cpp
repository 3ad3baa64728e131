// Under autocast a step of the sampler runs in float32, whatever the network's output came in.
#include "ops/common/autocast.h"

#include <torch/library.h>

#include "ops/scheduler_step/scheduler_step.h"

namespace dpa {
namespace {

template <at::DeviceType Device>
Tensor scheduler_step_autocast(const Tensor& model_output, const Tensor& sample, const Tensor& table,
                               const Tensor& index, const OptionalTensor& noise, double clip) {
  const Autocast cast(Device, at::kFloat);
  return scheduler_step(cast(model_output), cast(sample), cast(table), index, cast(noise), clip);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, AutocastCPU, m) { m.impl("scheduler_step", &scheduler_step_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(dpa, AutocastCUDA, m) { m.impl("scheduler_step", &scheduler_step_autocast<at::kCUDA>); }

}  // namespace dpa
