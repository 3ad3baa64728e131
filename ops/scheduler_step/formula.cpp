// `dpa::scheduler_step` and its backward in ATen ops: what forward-mode AD and second derivatives differentiate.
#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/zeros_like.h>

#include "ops/common/step_rows.h"
#include "ops/scheduler_step/scheduler_step.h"

namespace dpa {
namespace {

/// The step's quantities in the dtype of the arithmetic; coefficients broadcast against the sample.
struct SchedulerTerms {
  StepRows rows;
  Tensor output, sample, noise, raw, x0;

  SchedulerTerms(const Tensor& model_output, const Tensor& sample_, const Tensor& table, const Tensor& index,
                 const OptionalTensor& noise_, double clip)
      : rows(kSchedulerNames, sample_, table, index) {
    output = rows.widen(model_output);
    sample = rows.widen(sample_);
    noise = noise_.has_value() ? rows.widen(*noise_) : at::zeros_like(sample);
    raw = rows[0] * sample + rows[1] * output;
    x0 = at::clamp(raw, -clip, clip);
  }
};

}  // namespace

Tensor scheduler_step_formula(const Tensor& model_output, const Tensor& sample, const Tensor& table,
                              const Tensor& index, const OptionalTensor& noise, double clip) {
  check_scheduler_step(model_output, sample, table, index, noise, clip);
  const SchedulerTerms t(model_output, sample, table, index, noise, clip);
  const auto& r = t.rows;
  const auto mean = r[2] * t.x0 + r[3] * t.sample + r[4] * t.output;
  return r.narrow(noise.has_value() ? mean + r[5] * t.noise : mean);
}

StepGradients scheduler_step_backward_formula(const Tensor& grad, const Tensor& model_output, const Tensor& sample,
                                              const Tensor& table, const Tensor& index, const OptionalTensor& noise,
                                              double clip, StepMask output_mask) {
  check_scheduler_step(model_output, sample, table, index, noise, clip);
  check_same("scheduler_step_backward", "grad", grad, "sample", sample);
  const SchedulerTerms t(model_output, sample, table, index, noise, clip);
  const auto& r = t.rows;
  const auto g = r.widen(grad);
  const auto inside = (t.raw >= -clip).logical_and(t.raw <= clip);
  const auto grad_raw = g * r[2] * inside;
  StepGradients result;
  if (output_mask[0]) std::get<0>(result) = r.narrow(grad_raw * r[1] + g * r[4]);
  if (output_mask[1]) std::get<1>(result) = r.narrow(grad_raw * r[0] + g * r[3]);
  if (output_mask[2])
    std::get<2>(result) =
        r.sum_by_row({grad_raw * t.sample, grad_raw * t.output, g * t.x0, g * t.sample, g * t.output, g * t.noise});
  if (output_mask[3] && noise.has_value()) std::get<3>(result) = r.narrow(g * r[5]);
  return result;
}

}  // namespace dpa
