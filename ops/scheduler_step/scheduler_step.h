// `dpa::scheduler_step`: one step of any scheduler that is linear in sample, model output, x0 and noise.
#pragma once
#include "ops/common/diffusion_step.h"
#include "ops/common/op.h"

namespace dpa {

inline constexpr StepNames kSchedulerNames{"scheduler_step",    "table", "index", "noise", /*columns=*/6,
                                           /*flat_table=*/false};

/// The check of the op and of its backward.
void check_scheduler_step(const Tensor& model_output, const Tensor& sample, const Tensor& table, const Tensor& index,
                          const OptionalTensor& noise, double clip);

/// Through the dispatcher.
inline constexpr Op<"scheduler_step", Tensor(const Tensor& model_output, const Tensor& sample, const Tensor& table,
                                             const Tensor& index, const OptionalTensor& noise, double clip)>
    scheduler_step;
inline constexpr Op<"scheduler_step_backward",
                    StepGradients(const Tensor& grad, const Tensor& model_output, const Tensor& sample,
                                  const Tensor& table, const Tensor& index, const OptionalTensor& noise, double clip,
                                  StepMask output_mask)>
    scheduler_step_backward;

/// The op and its backward in ATen ops, differentiable to any order.
Tensor scheduler_step_formula(const Tensor& model_output, const Tensor& sample, const Tensor& table,
                              const Tensor& index, const OptionalTensor& noise, double clip);
StepGradients scheduler_step_backward_formula(const Tensor& grad, const Tensor& model_output, const Tensor& sample,
                                              const Tensor& table, const Tensor& index, const OptionalTensor& noise,
                                              double clip, StepMask output_mask);

}  // namespace dpa
