// CUDA launchers of `dpa::scheduler_step`.
#pragma once
#include "kernels/cuda/common/diffusion_step.h"

namespace dpa::kernels {

cudaError_t scheduler_step(const DiffusionStep& args, cudaStream_t stream);
cudaError_t scheduler_step_backward(const DiffusionStepBackward& args, cudaStream_t stream);

}  // namespace dpa::kernels
