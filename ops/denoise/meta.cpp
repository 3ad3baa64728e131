#include "ops/common/meta.h"

#include <torch/library.h>

#include "ops/denoise/denoise.h"

namespace dpa {
namespace {

Tensor denoise_meta(const Tensor& model_output, const Tensor& sample, const Tensor& diffusion_constants,
                    const Tensor& timestep, const Tensor& diffusion_noise) {
  check_step(kDenoiseNames, model_output, sample, diffusion_constants, timestep, diffusion_noise);
  return meta_like(sample);
}

StepGradients denoise_backward_meta(const Tensor& grad, const Tensor& model_output, const Tensor& sample,
                                    const Tensor& diffusion_constants, const Tensor& timestep,
                                    const Tensor& diffusion_noise, StepMask output_mask) {
  check_step(kDenoiseNames, model_output, sample, diffusion_constants, timestep, diffusion_noise);
  check_same("denoise_backward", "grad", grad, "sample", sample);
  return {meta_like(sample, output_mask[0]), meta_like(sample, output_mask[1]),
          meta_like(diffusion_constants, output_mask[2]), meta_like(sample, output_mask[3])};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("denoise", &denoise_meta);
  m.impl("denoise_backward", &denoise_backward_meta);
}

}  // namespace dpa
