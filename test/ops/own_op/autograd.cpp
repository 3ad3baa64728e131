#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <torch/library.h>

#include "ops/common/node.h"
#include "test/ops/own_op/swiglu.h"

namespace own {

Tensor swiglu(const Tensor& gate, const Tensor& value) {
  static const auto op = dpa::find_op<decltype(swiglu)>("own::swiglu");
  return op.call(gate, value);
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad, const Tensor& gate, const Tensor& value) {
  static const auto op = dpa::find_op<decltype(swiglu_backward)>("own::swiglu_backward");
  return op.call(grad, gate, value);
}

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
  dpa::NodePtr<SwigluBackward> node;
  if (torch::autograd::compute_requires_grad(gate, value)) {
    node = dpa::make_node<SwigluBackward>(gate, value);
    node->save(gate, value);
  }
  Tensor out;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    out = swiglu(gate, value);
  }
  if (node) torch::autograd::set_history(out, node);
  return out;
}

std::tuple<Tensor, Tensor> swiglu_backward_autograd(const Tensor& grad, const Tensor& gate, const Tensor& value) {
  // Second derivatives: the gradients in ATen's ops, which PyTorch differentiates.
  if (dpa::any_tangent(grad, gate, value) || torch::autograd::compute_requires_grad(grad, gate, value)) {
    const auto s = at::sigmoid(gate);
    return {grad * value * s * (1 + gate * (1 - s)), grad * gate * s};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return swiglu_backward(grad, gate, value);
}

}  // namespace

TORCH_LIBRARY_IMPL(own, Autograd, m) {
  m.impl("swiglu", &swiglu_autograd);
  m.impl("swiglu_backward", &swiglu_backward_autograd);
}

}  // namespace own
