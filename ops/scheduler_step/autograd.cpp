#include <torch/library.h>

#include "ops/common/node.h"
#include "ops/scheduler_step/scheduler_step.h"

namespace dpa {

Tensor scheduler_step(const Tensor& model_output, const Tensor& sample, const Tensor& table, const Tensor& index,
                      const OptionalTensor& noise, double clip) {
  static const auto op = find_op<decltype(scheduler_step)>("dpa::scheduler_step");
  return op.call(model_output, sample, table, index, noise, clip);
}

StepGradients scheduler_step_backward(const Tensor& grad, const Tensor& model_output, const Tensor& sample,
                                      const Tensor& table, const Tensor& index, const OptionalTensor& noise,
                                      double clip, StepMask output_mask) {
  static const auto op = find_op<decltype(scheduler_step_backward)>("dpa::scheduler_step_backward");
  return op.call(grad, model_output, sample, table, index, noise, clip, output_mask);
}

namespace {

struct SchedulerStepBackward : SavingNode<SchedulerStepBackward, 5, double> {
  std::string name() const override { return "SchedulerStepBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted, double clip) {
    const auto& [model_output, sample, table, index, noise] = saved;
    if (!gradients[0].defined()) return variable_list(4);
    const StepMask mask{wanted[0], wanted[1], wanted[2], noise.defined() && wanted[3]};
    auto [g0, g1, g2, g3] =
        scheduler_step_backward(gradients[0], model_output, sample, table, index, as_optional(noise), clip, mask);
    return {g0, g1, g2, g3};
  }
};

Tensor scheduler_step_autograd(const Tensor& model_output, const Tensor& sample, const Tensor& table,
                               const Tensor& index, const OptionalTensor& noise_, double clip) {
  const auto noise = value_or_undefined(noise_);
  if (any_tangent(model_output, sample, table, noise))
    return scheduler_step_formula(model_output, sample, table, index, noise_, clip);
  NodePtr<SchedulerStepBackward> node;
  if (torch::autograd::compute_requires_grad(model_output, sample, table, noise)) {
    node = make_node<SchedulerStepBackward>(model_output, sample, table, noise);
    node->save(model_output, sample, table, index, noise);
    node->constants = {clip};
  }
  Tensor out;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    out = scheduler_step(model_output, sample, table, index, noise_, clip);
  }
  if (node) torch::autograd::set_history(out, node);
  return out;
}

StepGradients scheduler_step_backward_autograd(const Tensor& grad, const Tensor& model_output, const Tensor& sample,
                                               const Tensor& table, const Tensor& index, const OptionalTensor& noise_,
                                               double clip, StepMask output_mask) {
  const auto noise = value_or_undefined(noise_);
  if (torch::autograd::compute_requires_grad(grad, model_output, sample, table, noise) ||
      any_tangent(grad, model_output, sample, table, noise))
    return scheduler_step_backward_formula(grad, model_output, sample, table, index, noise_, clip, output_mask);
  at::AutoDispatchBelowADInplaceOrView guard;
  return scheduler_step_backward(grad, model_output, sample, table, index, noise_, clip, output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("scheduler_step", &scheduler_step_autograd);
  m.impl("scheduler_step_backward", &scheduler_step_backward_autograd);
}

}  // namespace dpa
