#include <ATen/ops/add.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/library.h>

#include "ops/common/autocast.h"
#include "ops/common/node.h"
#include "ops/fused_relu_add/fused_relu_add.h"

namespace dpa {
namespace {

/// The gradient of y is the output's own; that of x passes where x is positive, which is libtorch's one kernel.
struct FusedReluAddBackward : SavingNode<FusedReluAddBackward, 1> {
  std::string name() const override { return "FusedReluAddBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted) {
    const auto& grad = gradients[0];
    if (!grad.defined()) return variable_list(2);
    return {wanted[0] ? at::threshold_backward(grad, saved[0], 0) : Tensor(), wanted[1] ? grad : Tensor()};
  }
};

Tensor fused_relu_add_autograd(const Tensor& x, const Tensor& y, double bias) {
  if (any_tangent(x, y)) {
    check_pair("fused_relu_add", "x", x, "y", y);
    return at::add(at::add(at::relu(x), y), bias);
  }
  const auto node = node_if_wanted<FusedReluAddBackward>(x, y);
  if (node) node->save(x);
  return with_history(below_autograd(fused_relu_add, x, y, bias), node);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) { m.impl("fused_relu_add", &fused_relu_add_autograd); }

// Under autocast tensors of different floating dtypes meet: the wider one wins, as in PyTorch's own sums.
DPA_AUTOCAST(fused_relu_add, InWidestType)

}  // namespace dpa
