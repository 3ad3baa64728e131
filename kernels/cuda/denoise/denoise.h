// CUDA launchers of `dpa::denoise`.
#pragma once
#include "kernels/cuda/common/diffusion_step.h"

namespace dpa::kernels {

cudaError_t denoise(const DiffusionStep& args, cudaStream_t stream);
cudaError_t denoise_backward(const DiffusionStepBackward& args, cudaStream_t stream);

}  // namespace dpa::kernels
