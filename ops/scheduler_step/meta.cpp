#include "ops/common/meta.h"

#include <torch/library.h>

#include "ops/scheduler_step/scheduler_step.h"

namespace dpa {
namespace {

Tensor scheduler_step_meta(const Tensor& model_output, const Tensor& sample, const Tensor& table, const Tensor& index,
                           const OptionalTensor& noise, double clip) {
  check_scheduler_step(model_output, sample, table, index, noise, clip);
  return meta_like(sample);
}

StepGradients scheduler_step_backward_meta(const Tensor& grad, const Tensor& model_output, const Tensor& sample,
                                           const Tensor& table, const Tensor& index, const OptionalTensor& noise,
                                           double clip, StepMask output_mask) {
  check_scheduler_step(model_output, sample, table, index, noise, clip);
  check_same("scheduler_step_backward", "grad", grad, "sample", sample);
  return {meta_like(sample, output_mask[0]), meta_like(sample, output_mask[1]), meta_like(table, output_mask[2]),
          meta_like(sample, output_mask[3])};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("scheduler_step", &scheduler_step_meta);
  m.impl("scheduler_step_backward", &scheduler_step_backward_meta);
}

}  // namespace dpa
