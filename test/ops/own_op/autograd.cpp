#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <torch/library.h>

#include "ops/common/node.h"
#include "test/ops/own_op/swiglu.h"

namespace own {
namespace {

using torch::autograd::variable_list;

struct SwigluBackward : dpa::SavingNode<SwigluBackward, 2> {
  std::string name() const override { return "SwigluBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const dpa::Wanted& wanted) {
    if (!gradients[0].defined()) return variable_list(2);
    auto [gate, value] = swiglu_backward(gradients[0], saved[0], saved[1]);
    return {wanted[0] ? gate : Tensor(), wanted[1] ? value : Tensor()};
  }
};

Tensor swiglu_autograd(const Tensor& gate, const Tensor& value) {
  if (dpa::any_tangent(gate, value)) {  // forward-mode AD: PyTorch differentiates the formula
    check(gate, value);
    return at::silu(gate) * value;
  }
  const auto node = dpa::node_if_wanted<SwigluBackward>(gate, value);
  if (node) node->save(gate, value);
  return dpa::with_history(dpa::below_autograd(swiglu, gate, value), node);
}

/// Second derivatives: the gradients in ATen's ops, which PyTorch differentiates.
std::tuple<Tensor, Tensor> swiglu_backward_formula(const Tensor& grad, const Tensor& gate, const Tensor& value) {
  const auto s = at::sigmoid(gate);
  return {grad * value * s * (1 + gate * (1 - s)), grad * gate * s};
}

}  // namespace

TORCH_LIBRARY_IMPL(own, Autograd, m) {
  m.impl("swiglu", &swiglu_autograd);
  m.impl("swiglu_backward", dpa::formula_autograd<swiglu_backward, &swiglu_backward_formula>);
}

}  // namespace own
