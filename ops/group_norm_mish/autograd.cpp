#include <torch/library.h>

#include <algorithm>

#include "ops/common/node.h"
#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {

Tensor group_norm_mish(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                       const OptionalTensor& bias, double eps, const OptionalTensor& scale, const OptionalTensor& shift,
                       const OptionalTensor& residual) {
  static const auto op = find_op<decltype(group_norm_mish)>("dpa::group_norm_mish");
  return op.call(input, num_groups, weight, bias, eps, scale, shift, residual);
}

NormGradients group_norm_mish_backward(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                       const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                       const OptionalTensor& scale, const OptionalTensor& shift, NormMask output_mask) {
  static const auto op = find_op<decltype(group_norm_mish_backward)>("dpa::group_norm_mish_backward");
  return op.call(grad, input, num_groups, weight, bias, eps, scale, shift, output_mask);
}

namespace {

/// Edges lead to input, weight, bias, scale, shift and residual; the last is not saved, its gradient is the output's.
struct GroupNormMishBackward : SavingNode<GroupNormMishBackward, 5, int64_t, double> {
  std::string name() const override { return "GroupNormMishBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted,
                                int64_t num_groups, double eps) {
    const auto& [input, weight, bias, scale, shift] = saved;
    if (!gradients[0].defined()) return variable_list(6);
    NormMask mask;
    for (size_t i = 0; i < mask.size(); ++i) mask[i] = saved[i].defined() && wanted[i];
    variable_list to(6);
    if (std::find(mask.begin(), mask.end(), true) != mask.end())
      std::tie(to[0], to[1], to[2], to[3], to[4]) =
          group_norm_mish_backward(gradients[0], input, num_groups, as_optional(weight), as_optional(bias), eps,
                                   as_optional(scale), as_optional(shift), mask);
    if (wanted[5]) to[5] = gradients[0];
    return to;
  }
};

Tensor group_norm_mish_autograd(const Tensor& input, int64_t num_groups, const OptionalTensor& weight_,
                                const OptionalTensor& bias_, double eps, const OptionalTensor& scale_,
                                const OptionalTensor& shift_, const OptionalTensor& residual_) {
  const auto weight = value_or_undefined(weight_), bias = value_or_undefined(bias_);
  const auto scale = value_or_undefined(scale_), shift = value_or_undefined(shift_);
  const auto residual = value_or_undefined(residual_);
  if (any_tangent(input, weight, bias, scale, shift, residual))
    return group_norm_mish_formula(input, num_groups, weight_, bias_, eps, scale_, shift_, residual_);
  NodePtr<GroupNormMishBackward> node;
  if (torch::autograd::compute_requires_grad(input, weight, bias, scale, shift, residual)) {
    node = make_node<GroupNormMishBackward>(input, weight, bias, scale, shift, residual);
    node->save(input, weight, bias, scale, shift);
    node->constants = {num_groups, eps};
  }
  Tensor out;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    out = group_norm_mish(input, num_groups, weight_, bias_, eps, scale_, shift_, residual_);
  }
  if (node) torch::autograd::set_history(out, node);
  return out;
}

NormGradients group_norm_mish_backward_autograd(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                                const OptionalTensor& weight_, const OptionalTensor& bias_, double eps,
                                                const OptionalTensor& scale_, const OptionalTensor& shift_,
                                                NormMask output_mask) {
  const auto weight = value_or_undefined(weight_), bias = value_or_undefined(bias_);
  const auto scale = value_or_undefined(scale_), shift = value_or_undefined(shift_);
  if (torch::autograd::compute_requires_grad(grad, input, weight, bias, scale, shift) ||
      any_tangent(grad, input, weight, bias, scale, shift))
    return group_norm_mish_backward_formula(grad, input, num_groups, weight_, bias_, eps, scale_, shift_, output_mask);
  at::AutoDispatchBelowADInplaceOrView guard;
  return group_norm_mish_backward(grad, input, num_groups, weight_, bias_, eps, scale_, shift_, output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("group_norm_mish", &group_norm_mish_autograd);
  m.impl("group_norm_mish_backward", &group_norm_mish_backward_autograd);
}

}  // namespace dpa
