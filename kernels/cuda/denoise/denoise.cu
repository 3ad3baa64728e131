// `dpa::denoise` on CUDA: the formula is math::DenoiseStep, the kernels and their map are in diffusion_step.cuh.
#include "kernels/cuda/common/diffusion_step.cuh"
#include "kernels/cuda/denoise/denoise.h"

namespace dpa::kernels {

cudaError_t denoise(const DiffusionStep& args, cudaStream_t stream) {
  return launch_step<math::DenoiseStep>(args, stream);
}

cudaError_t denoise_backward(const DiffusionStepBackward& args, cudaStream_t stream) {
  return launch_step_backward<math::DenoiseStep>(args, stream);
}

}  // namespace dpa::kernels
