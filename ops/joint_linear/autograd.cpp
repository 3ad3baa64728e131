#include <torch/library.h>

#include <algorithm>

#include "ops/common/node.h"
#include "ops/joint_linear/joint_linear.h"

namespace dpa {

Tensor joint_linear(const Tensor& input, at::TensorList weights, at::TensorList biases, const OptionalTensor& rest) {
  static const auto op = find_op<decltype(joint_linear)>("dpa::joint_linear");
  return op.call(input, weights, biases, rest);
}

JointLinearGradients joint_linear_backward(const Tensor& grad, const Tensor& input, at::TensorList weights,
                                           at::TensorList biases, const OptionalTensor& rest,
                                           JointLinearMask output_mask) {
  static const auto op = find_op<decltype(joint_linear_backward)>("dpa::joint_linear_backward");
  return op.call(grad, input, weights, biases, rest, output_mask);
}

namespace {

bool any_tangent_in(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return any_tangent(t); });
}

/// Saves input, weights, biases and the rest, in this order, which is that of its edges.
struct JointLinearBackward : SavingNode<JointLinearBackward, 0> {
  std::string name() const override { return "JointLinearBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted) {
    const size_t layers = saved.size() / 2 - 1;
    variable_list result(saved.size());
    if (!gradients[0].defined()) return result;
    const at::TensorList all(saved), weights = all.slice(1, layers), biases = all.slice(1 + layers, layers);
    const auto any = [&](size_t first, size_t count) {
      const auto begin = wanted.begin() + first;
      return std::find(begin, begin + count, true) != begin + count;
    };
    const Tensor& rest = saved.back();
    const JointLinearMask mask{wanted[0], any(1, layers), any(1 + layers, layers), rest.defined() && wanted.back()};
    Tensor weight, bias;
    std::tie(result.front(), weight, bias, result.back()) =
        joint_linear_backward(gradients[0], saved[0], weights, biases, as_optional(rest), mask);
    c10::SymInt row = 0;
    for (size_t i = 0; i < layers; ++i) {
      const auto rows = weights[i].sym_size(0);
      if (wanted[1 + i]) result[1 + i] = weight.narrow_symint(0, row, rows);
      if (wanted[1 + layers + i]) result[1 + layers + i] = bias.narrow_symint(0, row, rows);
      row = row + rows;
    }
    return result;
  }
};

Tensor joint_linear_autograd(const Tensor& input, at::TensorList weights, at::TensorList biases,
                             const OptionalTensor& rest_) {
  const auto rest = value_or_undefined(rest_);
  if (any_tangent(input, rest) || any_tangent_in(weights) || any_tangent_in(biases)) {
    check_joint_linear(input, weights, biases, rest_);
    return joint_linear_formula(input, weights, biases, rest_);
  }
  if (!torch::autograd::compute_requires_grad(input, weights, biases, rest)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return joint_linear(input, weights, biases, rest_);
  }
  auto node = make_node<JointLinearBackward>(input, weights, biases, rest);
  Tensor out;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    out = joint_linear(input, weights, biases, rest_);
  }
  std::vector<Tensor> saved{input};
  saved.insert(saved.end(), weights.begin(), weights.end());
  saved.insert(saved.end(), biases.begin(), biases.end());
  saved.push_back(rest);
  node->save_all(saved);
  torch::autograd::set_history(out, node);
  return out;
}

JointLinearGradients joint_linear_backward_autograd(const Tensor& grad, const Tensor& input, at::TensorList weights,
                                                    at::TensorList biases, const OptionalTensor& rest_,
                                                    JointLinearMask mask) {
  const auto rest = value_or_undefined(rest_);
  if (torch::autograd::compute_requires_grad(grad, input, weights, biases, rest) || any_tangent(grad, input, rest) ||
      any_tangent_in(weights) || any_tangent_in(biases))
    return joint_linear_backward_formula(grad, input, weights, biases, rest_, mask);
  at::AutoDispatchBelowADInplaceOrView guard;
  return joint_linear_backward(grad, input, weights, biases, rest_, mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("joint_linear", &joint_linear_autograd);
  m.impl("joint_linear_backward", &joint_linear_backward_autograd);
}

}  // namespace dpa
