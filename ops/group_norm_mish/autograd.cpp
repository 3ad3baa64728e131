#include <torch/library.h>

#include <algorithm>

#include "ops/common/autocast.h"
#include "ops/common/node.h"
#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

/// Edges lead to input, weight, bias, scale, shift and residual; the last is not saved, its gradient is the output's.
struct GroupNormMishBackward : SavingNode<GroupNormMishBackward, 5, int64_t, double> {
  std::string name() const override { return "GroupNormMishBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted,
                                int64_t num_groups, double eps) {
    const auto& [input, weight, bias, scale, shift] = saved;
    if (!gradients[0].defined()) return variable_list(6);
    const auto mask = mask_of<NormMask>(saved, wanted);
    variable_list to(6);
    if (std::find(mask.begin(), mask.end(), true) != mask.end())
      std::tie(to[0], to[1], to[2], to[3], to[4]) =
          group_norm_mish_backward(gradients[0], input, num_groups, as_optional(weight), as_optional(bias), eps,
                                   as_optional(scale), as_optional(shift), mask);
    if (wanted[5]) to[5] = gradients[0];
    return to;
  }
};

Tensor group_norm_mish_autograd(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                                const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                                const OptionalTensor& shift, const OptionalTensor& residual) {
  if (any_tangent(input, weight, bias, scale, shift, residual))
    return group_norm_mish_formula(input, num_groups, weight, bias, eps, scale, shift, residual);
  const auto node = node_if_wanted<GroupNormMishBackward>(input, weight, bias, scale, shift, residual);
  if (node) {
    node->save(input, weight, bias, scale, shift);
    node->constants = {num_groups, eps};
  }
  return with_history(below_autograd(group_norm_mish, input, num_groups, weight, bias, eps, scale, shift, residual),
                      node);
}

/// Under autocast the tensors come in the region's 16-bit dtype; statistics are float32 inside the kernels anyway.
/// Beside channels-last activations weight and bias stay float32, because those kernels take them so and casts are
/// launches.
Tensor group_norm_mish_autocast(const Autocast& cast, const Tensor& input, int64_t num_groups,
                                const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                const OptionalTensor& scale, const OptionalTensor& shift,
                                const OptionalTensor& residual) {
  const auto x = cast(input);
  const auto parameter = [&](const OptionalTensor& tensor) {
    const bool stays = tensor.has_value() && tensor->scalar_type() == at::kFloat && is_channels_last(x);
    return stays ? tensor : cast(tensor);
  };
  return group_norm_mish(x, num_groups, parameter(weight), parameter(bias), eps, cast(scale), cast(shift),
                         cast(residual));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("group_norm_mish", &group_norm_mish_autograd);
  m.impl("group_norm_mish_backward", formula_autograd<group_norm_mish_backward, &group_norm_mish_backward_formula>);
}

DPA_AUTOCAST(group_norm_mish, With<group_norm_mish_autocast>)

}  // namespace dpa
