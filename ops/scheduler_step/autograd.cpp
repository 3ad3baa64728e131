#include <torch/library.h>

#include "ops/common/autocast.h"
#include "ops/common/node.h"
#include "ops/scheduler_step/scheduler_step.h"

namespace dpa {
namespace {

struct SchedulerStepBackward : SavingNode<SchedulerStepBackward, 5, double> {
  std::string name() const override { return "SchedulerStepBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted, double clip) {
    const auto& [model_output, sample, table, index, noise] = saved;
    if (!gradients[0].defined()) return variable_list(4);
    const StepMask mask{wanted[0], wanted[1], wanted[2], noise.defined() && wanted[3]};
    return as_list(
        scheduler_step_backward(gradients[0], model_output, sample, table, index, as_optional(noise), clip, mask));
  }
};

Tensor scheduler_step_autograd(const Tensor& model_output, const Tensor& sample, const Tensor& table,
                               const Tensor& index, const OptionalTensor& noise, double clip) {
  if (any_tangent(model_output, sample, table, noise))
    return scheduler_step_formula(model_output, sample, table, index, noise, clip);
  const auto node = node_if_wanted<SchedulerStepBackward>(model_output, sample, table, noise);
  if (node) {
    node->save(model_output, sample, table, index, noise);
    node->constants = {clip};
  }
  return with_history(below_autograd(scheduler_step, model_output, sample, table, index, noise, clip), node);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("scheduler_step", &scheduler_step_autograd);
  m.impl("scheduler_step_backward", formula_autograd<scheduler_step_backward, &scheduler_step_backward_formula>);
}

// Under autocast a step of the sampler runs in float32, whatever the network's output came in.
DPA_AUTOCAST(scheduler_step, InFloat)

}  // namespace dpa
