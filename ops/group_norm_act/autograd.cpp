#include <torch/library.h>

#include <algorithm>

#include "ops/common/autocast.h"
#include "ops/common/later_join.h"
#include "ops/common/node.h"
#include "ops/group_norm_act/group_norm_act.h"

namespace dpa {
namespace {

/// Edges lead to input, weight, bias and residual. The residual is saved for the sign of ReLU's input alone; without
/// ReLU its gradient is the output's.
struct GroupNormActBackward : SavingNode<GroupNormActBackward, 4, int64_t, double, bool> {
  std::string name() const override { return "GroupNormActBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted,
                                int64_t num_groups, double eps, bool relu) {
    const auto& [input, weight, bias, residual] = saved;
    const auto& grad = gradients[0];
    if (!grad.defined()) return variable_list(4);
    auto mask = mask_of<NormActMask>(saved, wanted);
    variable_list to(4);
    if (!relu && wanted[3]) to[3] = grad;
    if (std::find(mask.begin(), mask.end(), true) != mask.end()) {
      const LaterJoin later(grad);
      auto found = as_list(group_norm_act_backward(grad, input, num_groups, as_optional(weight), as_optional(bias), eps,
                                                   as_optional(residual), relu, mask));
      std::copy(found.begin(), found.end() - (relu ? 0 : 1), to.begin());
    }
    return to;
  }
};

Tensor group_norm_act_autograd(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps, const OptionalTensor& residual, bool relu) {
  if (any_tangent(input, weight, bias, residual))
    return group_norm_act_formula(input, num_groups, weight, bias, eps, residual, relu);
  const auto node = node_if_wanted<GroupNormActBackward>(input, weight, bias, residual);
  if (node) {
    node->save(input, weight, bias, relu ? residual : OptionalTensor());
    node->constants = {num_groups, eps, relu};
  }
  return with_history(below_autograd(group_norm_act, input, num_groups, weight, bias, eps, residual, relu), node);
}

/// Under autocast the activations come in the region's 16-bit dtype, whose statistics are float32 all the same;
/// parameters stay float32, as the op takes them.
Tensor group_norm_act_autocast(const Autocast& cast, const Tensor& input, int64_t num_groups,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                               const OptionalTensor& residual, bool relu) {
  const auto narrow = cast(input);
  return group_norm_act(narrow, num_groups, cast.parameter(weight, narrow), cast.parameter(bias, narrow), eps,
                        cast(residual), relu);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("group_norm_act", &group_norm_act_autograd);
  m.impl("group_norm_act_backward", formula_autograd<group_norm_act_backward, &group_norm_act_backward_formula>);
}

DPA_AUTOCAST(group_norm_act, With<group_norm_act_autocast>)

}  // namespace dpa
