#include <torch/library.h>

#include "kernels/cuda/denoise/denoise.h"
#include "ops/common/diffusion_step_cuda.h"
#include "ops/denoise/denoise.h"

namespace dpa {
namespace {

Tensor denoise_cuda(const Tensor& model_output, const Tensor& sample, const Tensor& diffusion_constants,
                    const Tensor& timestep, const Tensor& diffusion_noise) {
  check_step(kDenoiseNames, model_output, sample, diffusion_constants, timestep, diffusion_noise);
  const StepInputs in(model_output, sample, diffusion_constants, timestep, diffusion_noise, kDenoiseNames.columns);
  return step_cuda(&kernels::denoise, in, kNoClip);
}

StepGradients denoise_backward_cuda(const Tensor& grad, const Tensor& model_output, const Tensor& sample,
                                    const Tensor& diffusion_constants, const Tensor& timestep,
                                    const Tensor& diffusion_noise, StepMask output_mask) {
  check_step(kDenoiseNames, model_output, sample, diffusion_constants, timestep, diffusion_noise);
  const StepInputs in(model_output, sample, diffusion_constants, timestep, diffusion_noise, kDenoiseNames.columns);
  check_same("denoise_backward", "grad", grad, "sample", sample);
  return step_backward_cuda(&kernels::denoise_backward, in, kNoClip, grad, diffusion_constants, output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("denoise", &denoise_cuda);
  m.impl("denoise_backward", &denoise_backward_cuda);
}

}  // namespace dpa
