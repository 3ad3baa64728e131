#include <torch/library.h>

#include <algorithm>

#include "ops/batch_norm_act/batch_norm_act.h"
#include "ops/common/autocast.h"
#include "ops/common/node.h"

namespace dpa {
namespace {

/// Edges lead to input, weight, bias and residual. The residual is saved for the sign of ReLU's input alone; without
/// ReLU its gradient is the output's.
struct BatchNormActBackward : SavingNode<BatchNormActBackward, 6, double, bool> {
  std::string name() const override { return "BatchNormActBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted, double eps,
                                bool relu) {
    const auto& [input, weight, bias, residual, mean, var] = saved;
    const auto& grad = gradients[0];
    if (!grad.defined()) return variable_list(4);
    auto mask = mask_of<BatchNormMask>(saved, wanted);
    variable_list to(4);
    if (!relu && wanted[3]) to[3] = grad;
    if (std::find(mask.begin(), mask.end(), true) != mask.end()) {
      auto found = as_list(batch_norm_act_backward(grad, input, mean, var, as_optional(weight), as_optional(bias), eps,
                                                   as_optional(residual), relu, mask));
      std::copy(found.begin(), found.end() - (relu ? 0 : 1), to.begin());
    }
    return to;
  }
};

/// The statistics have no derivatives.
BatchNormOutputs batch_norm_act_forward_autograd(const Tensor& input, const OptionalTensor& weight,
                                                 const OptionalTensor& bias, double eps, const OptionalTensor& residual,
                                                 bool relu) {
  if (any_tangent(input, weight, bias, residual))
    return batch_norm_act_forward_formula(input, weight, bias, eps, residual, relu);
  const auto node = node_if_wanted<BatchNormActBackward>(input, weight, bias, residual);
  auto outputs = below_autograd(batch_norm_act_forward, input, weight, bias, eps, residual, relu);
  if (node) {
    const auto& [out, mean, var] = outputs;
    node->save(input, weight, bias, relu ? residual : OptionalTensor(), mean, var);
    node->constants = {eps, relu};
    torch::autograd::set_history(out, node);
  }
  return outputs;
}

Tensor batch_norm_act_autograd(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                               double eps, const OptionalTensor& residual, bool relu) {
  if (any_tangent(input, weight, bias, residual) || any_gradient(input, weight, bias, residual))
    return std::get<0>(batch_norm_act_forward_autograd(input, weight, bias, eps, residual, relu));
  return below_autograd(batch_norm_act, input, weight, bias, eps, residual, relu);
}

/// Under autocast the activations come in the region's 16-bit dtype, whose statistics are float32 all the same;
/// parameters stay float32, as the op takes them.
Tensor batch_norm_act_autocast(const Autocast& cast, const Tensor& input, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps, const OptionalTensor& residual, bool relu) {
  const auto narrow = cast(input);
  return batch_norm_act(narrow, cast.parameter(weight, narrow), cast.parameter(bias, narrow), eps, cast(residual),
                        relu);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("batch_norm_act", &batch_norm_act_autograd);
  m.impl("batch_norm_act_forward", &batch_norm_act_forward_autograd);
  m.impl("batch_norm_act_backward", formula_autograd<batch_norm_act_backward, &batch_norm_act_backward_formula>);
}

DPA_AUTOCAST(batch_norm_act, With<batch_norm_act_autocast>)

}  // namespace dpa
