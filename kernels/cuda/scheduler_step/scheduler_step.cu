// `dpa::scheduler_step` on CUDA: the formula is math::SchedulerStep, the kernels and their map are in
// diffusion_step.cuh.
#include "kernels/cuda/common/diffusion_step.cuh"
#include "kernels/cuda/scheduler_step/scheduler_step.h"

namespace dpa::kernels {

cudaError_t scheduler_step(const DiffusionStep& args, cudaStream_t stream) {
  return launch_step<math::SchedulerStep>(args, stream);
}

cudaError_t scheduler_step_backward(const DiffusionStepBackward& args, cudaStream_t stream) {
  return launch_step_backward<math::SchedulerStep>(args, stream);
}

}  // namespace dpa::kernels
