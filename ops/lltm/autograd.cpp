#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "ops/common/autocast.h"
#include "ops/common/node.h"
#include "ops/lltm/lltm.h"

namespace dpa {
namespace {

/// Saves the gates before their bias, so that the backward repeats no GEMM. Where the backward is itself
/// differentiated, it starts from the inputs instead, since what is saved carries no history.
struct LltmBackward : SavingNode<LltmBackward, 6> {
  std::string name() const override { return "LltmBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted) {
    const auto& [input, weights, bias, old_h, old_cell, gates] = saved;
    if (!gradients[0].defined() && !gradients[1].defined()) return variable_list(5);
    const auto grad_h = gradients[0].defined() ? gradients[0] : at::zeros_like(old_h);
    const auto grad_cell = gradients[1].defined() ? gradients[1] : at::zeros_like(old_h);
    const auto mask = mask_of<LltmMask>(saved, wanted);
    return as_list(any_gradient(grad_h, grad_cell, input, weights, bias, old_h, old_cell) ||
                           any_tangent(grad_h, grad_cell)
                       ? lltm_backward_formula(grad_h, grad_cell, input, weights, bias, old_h, old_cell, mask)
                       : lltm_backward(grad_h, grad_cell, input, weights, bias, old_h, old_cell, gates, mask));
  }
};

LltmState lltm_autograd(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                        const Tensor& old_cell) {
  if (any_tangent(input, weights, bias, old_h, old_cell)) return lltm_formula(input, weights, bias, old_h, old_cell);
  if (!any_gradient(input, weights, bias, old_h, old_cell))
    return below_autograd(lltm, input, weights, bias, old_h, old_cell);
  auto node = make_node<LltmBackward>(input, weights, bias, old_h, old_cell);
  const auto [new_h, new_cell, gates] = below_autograd(lltm_forward, input, weights, bias, old_h, old_cell);
  node->save(input, weights, bias, old_h, old_cell, gates);
  torch::autograd::set_history(new_h, node);
  torch::autograd::set_history(new_cell, node);
  return {new_h, new_cell};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("lltm", &lltm_autograd);
  // Below lltm's own node only a transform around it (torch.func) wants derivatives.
  m.impl("lltm_forward", formula_autograd<lltm_forward, &lltm_forward_formula>);
  // A step on the way, which users do not differentiate: its gradient raises.
  m.impl("lltm_backward", torch::autograd::autogradNotImplementedFallback());
}

// Under autocast the cell comes in the region's 16-bit dtype, as PyTorch's own recurrent cells do.
DPA_AUTOCAST(lltm, InRegionType)

}  // namespace dpa
