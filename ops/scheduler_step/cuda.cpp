#include <torch/library.h>

#include "kernels/cuda/scheduler_step/scheduler_step.h"
#include "ops/common/diffusion_step_cuda.h"
#include "ops/scheduler_step/scheduler_step.h"

namespace dpa {
namespace {

Tensor scheduler_step_cuda(const Tensor& model_output, const Tensor& sample, const Tensor& table, const Tensor& index,
                           const OptionalTensor& noise, double clip) {
  check_scheduler_step(model_output, sample, table, index, noise, clip);
  return step_cuda(&kernels::scheduler_step,
                   StepInputs(model_output, sample, table, index, noise, kSchedulerNames.columns), clip);
}

StepGradients scheduler_step_backward_cuda(const Tensor& grad, const Tensor& model_output, const Tensor& sample,
                                           const Tensor& table, const Tensor& index, const OptionalTensor& noise,
                                           double clip, StepMask output_mask) {
  check_scheduler_step(model_output, sample, table, index, noise, clip);
  check_same("scheduler_step_backward", "grad", grad, "sample", sample);
  const StepInputs in(model_output, sample, table, index, noise, kSchedulerNames.columns);
  return step_backward_cuda(&kernels::scheduler_step_backward, in, clip, grad, table, output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("scheduler_step", &scheduler_step_cuda);
  m.impl("scheduler_step_backward", &scheduler_step_backward_cuda);
}

}  // namespace dpa
