#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "ops/common/node.h"
#include "ops/lltm/lltm.h"

namespace dpa {

LltmState lltm(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
               const Tensor& old_cell) {
  static const auto op = find_op<decltype(lltm)>("dpa::lltm");
  return op.call(input, weights, bias, old_h, old_cell);
}

LltmStateAndGates lltm_forward(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                               const Tensor& old_cell) {
  static const auto op = find_op<decltype(lltm_forward)>("dpa::lltm_forward");
  return op.call(input, weights, bias, old_h, old_cell);
}

LltmGradients lltm_backward(const Tensor& grad_h, const Tensor& grad_cell, const Tensor& input, const Tensor& weights,
                            const Tensor& bias, const Tensor& old_h, const Tensor& old_cell, const Tensor& gates,
                            LltmMask output_mask) {
  static const auto op = find_op<decltype(lltm_backward)>("dpa::lltm_backward");
  return op.call(grad_h, grad_cell, input, weights, bias, old_h, old_cell, gates, output_mask);
}

namespace {

/// Saves the gates' products, so that the backward repeats no matrix product. Where the backward is itself
/// differentiated, it starts from the inputs instead, since the products carry no history.
struct LltmBackward : SavingNode<LltmBackward, 6> {
  std::string name() const override { return "LltmBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted) {
    const auto& [input, weights, bias, old_h, old_cell, gates] = saved;
    if (!gradients[0].defined() && !gradients[1].defined()) return variable_list(5);
    const auto grad_h = gradients[0].defined() ? gradients[0] : at::zeros_like(old_h);
    const auto grad_cell = gradients[1].defined() ? gradients[1] : at::zeros_like(old_h);
    LltmMask mask;
    for (size_t i = 0; i < mask.size(); ++i) mask[i] = wanted[i];
    const bool again = at::GradMode::is_enabled() &&
                       torch::autograd::compute_requires_grad(grad_h, grad_cell, input, weights, bias, old_h, old_cell);
    auto [g0, g1, g2, g3, g4] =
        again || any_tangent(grad_h, grad_cell)
            ? lltm_backward_formula(grad_h, grad_cell, input, weights, bias, old_h, old_cell, mask)
            : lltm_backward(grad_h, grad_cell, input, weights, bias, old_h, old_cell, gates, mask);
    return {g0, g1, g2, g3, g4};
  }
};

LltmState lltm_autograd(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                        const Tensor& old_cell) {
  if (any_tangent(input, weights, bias, old_h, old_cell)) return lltm_formula(input, weights, bias, old_h, old_cell);
  if (!torch::autograd::compute_requires_grad(input, weights, bias, old_h, old_cell)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return lltm(input, weights, bias, old_h, old_cell);
  }
  auto node = make_node<LltmBackward>(input, weights, bias, old_h, old_cell);
  Tensor new_h, new_cell, gates;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(new_h, new_cell, gates) = lltm_forward(input, weights, bias, old_h, old_cell);
  }
  node->save(input, weights, bias, old_h, old_cell, gates);
  torch::autograd::set_history(new_h, node);
  torch::autograd::set_history(new_cell, node);
  return {new_h, new_cell};
}

/// Below lltm's own node only a transform around it (torch.func) asks for derivatives.
LltmStateAndGates lltm_forward_autograd(const Tensor& input, const Tensor& weights, const Tensor& bias,
                                        const Tensor& old_h, const Tensor& old_cell) {
  if (torch::autograd::compute_requires_grad(input, weights, bias, old_h, old_cell) ||
      any_tangent(input, weights, bias, old_h, old_cell))
    return lltm_forward_formula(input, weights, bias, old_h, old_cell);
  at::AutoDispatchBelowADInplaceOrView guard;
  return lltm_forward(input, weights, bias, old_h, old_cell);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("lltm", &lltm_autograd);
  m.impl("lltm_forward", &lltm_forward_autograd);
  // A step on the way, which users do not differentiate: asking for it raises.
  m.impl("lltm_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace dpa
