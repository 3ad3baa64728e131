// `dpa::denoise`: one DDPM step with epsilon prediction. See library.cpp for the schema and docs for the formula.
#pragma once
#include "ops/common/diffusion_step.h"
#include "ops/common/op.h"

namespace dpa {

inline constexpr StepNames kDenoiseNames{"denoise",         "diffusion_constants", "timestep",
                                         "diffusion_noise", /*columns=*/5,         /*flat_table=*/true};
inline constexpr double kNoClip = 0;  // the formula clamps x0 to [-1, 1] by itself

/// Through the dispatcher.
inline constexpr Op<"denoise",
                    Tensor(const Tensor& model_output, const Tensor& sample, const Tensor& diffusion_constants,
                           const Tensor& timestep, const Tensor& diffusion_noise)>
    denoise;
inline constexpr Op<"denoise_backward",
                    StepGradients(const Tensor& grad, const Tensor& model_output, const Tensor& sample,
                                  const Tensor& diffusion_constants, const Tensor& timestep,
                                  const Tensor& diffusion_noise, StepMask output_mask)>
    denoise_backward;

/// The op and its backward in ATen ops, differentiable to any order.
Tensor denoise_formula(const Tensor& model_output, const Tensor& sample, const Tensor& diffusion_constants,
                       const Tensor& timestep, const Tensor& diffusion_noise);
StepGradients denoise_backward_formula(const Tensor& grad, const Tensor& model_output, const Tensor& sample,
                                       const Tensor& diffusion_constants, const Tensor& timestep,
                                       const Tensor& diffusion_noise, StepMask output_mask);

}  // namespace dpa
