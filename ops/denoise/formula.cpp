// `dpa::denoise` and its backward in ATen ops: what forward-mode AD and second derivatives differentiate.
#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "ops/common/step_rows.h"
#include "ops/denoise/denoise.h"

namespace dpa {
namespace {

/// The step's quantities in the dtype of the arithmetic; coefficients broadcast against the sample.
struct DenoiseTerms {
  StepRows rows;
  Tensor output, sample, noise, noisy, raw, x0;

  DenoiseTerms(const Tensor& model_output, const Tensor& sample_, const Tensor& constants, const Tensor& timestep,
               const Tensor& noise_)
      : rows(kDenoiseNames, sample_, constants, timestep) {
    output = rows.widen(model_output);
    sample = rows.widen(sample_);
    noisy = rows.broadcast(timestep) != 0;
    noise = at::where(noisy, rows.widen(noise_), at::zeros({}, sample.options()));
    raw = (sample - rows[0] * output) / rows[1];
    x0 = at::clamp(raw, -1, 1);
  }
};

}  // namespace

Tensor denoise_formula(const Tensor& model_output, const Tensor& sample, const Tensor& diffusion_constants,
                       const Tensor& timestep, const Tensor& diffusion_noise) {
  check_step(kDenoiseNames, model_output, sample, diffusion_constants, timestep, diffusion_noise);
  const DenoiseTerms t(model_output, sample, diffusion_constants, timestep, diffusion_noise);
  const auto& c = t.rows;
  return (c[3] * t.x0 + c[2] * t.sample + c[4] * t.noise).to(sample.scalar_type());
}

StepGradients denoise_backward_formula(const Tensor& grad, const Tensor& model_output, const Tensor& sample,
                                       const Tensor& diffusion_constants, const Tensor& timestep,
                                       const Tensor& diffusion_noise, StepMask output_mask) {
  check_step(kDenoiseNames, model_output, sample, diffusion_constants, timestep, diffusion_noise);
  check_same("denoise_backward", "grad", grad, "sample", sample);
  const DenoiseTerms t(model_output, sample, diffusion_constants, timestep, diffusion_noise);
  const auto& c = t.rows;
  const auto g = c.widen(grad);
  const auto inside = (t.raw >= -1).logical_and(t.raw <= 1);
  const auto grad_raw = g * c[3] * inside;
  StepGradients result;
  if (output_mask[0]) std::get<0>(result) = c.narrow(-grad_raw * c[0] / c[1]);
  if (output_mask[1]) std::get<1>(result) = c.narrow(grad_raw / c[1] + g * c[2]);
  if (output_mask[2])
    std::get<2>(result) =
        c.sum_by_row({-grad_raw * t.output / c[1], -grad_raw * t.raw / c[1], g * t.sample, g * t.x0, g * t.noise});
  if (output_mask[3]) std::get<3>(result) = c.narrow(g * c[4] * t.noisy);
  return result;
}

}  // namespace dpa
