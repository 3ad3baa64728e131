#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/common/capture.h"
#include "ops/common/node.h"
#include "ops/joint_linear/joint_linear.h"

namespace dpa {

Tensor joint_linear(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  static const auto op = find_op<decltype(joint_linear)>("dpa::joint_linear");
  return op.call(input, weights, biases);
}

JointLinearForward joint_linear_forward(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  static const auto op = find_op<decltype(joint_linear_forward)>("dpa::joint_linear_forward");
  return op.call(input, weights, biases);
}

JointLinearGradients joint_linear_backward(const Tensor& grad, const Tensor& input, at::TensorList weights,
                                           at::TensorList biases, const Tensor& packed, JointLinearMask output_mask) {
  static const auto op = find_op<decltype(joint_linear_backward)>("dpa::joint_linear_backward");
  return op.call(grad, input, weights, biases, packed, output_mask);
}

namespace {

bool any_tangent_in(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return any_tangent(t); });
}

/// Saves input, weights, biases and what the forward packed, in this order; its edges are those of the first three.
struct JointLinearBackward : SavingNode<0> {
  std::string name() const override { return "JointLinearBackward"; }

  variable_list backward(const variable_list& gradients, std::vector<Tensor>& saved) override {
    const size_t layers = saved.size() / 2 - 1;
    variable_list result(1 + 2 * layers);
    if (!gradients[0].defined()) return result;
    const at::TensorList all(saved), weights = all.slice(1, layers), biases = all.slice(1 + layers, layers);
    const auto wanted = [&](size_t first, size_t count) {
      for (size_t i = first; i < first + count; ++i)
        if (task_should_compute_output(i)) return true;
      return false;
    };
    const JointLinearMask mask{wanted(0, 1), wanted(1, layers), wanted(1 + layers, layers)};
    const auto [input, weight, bias] = backward_of(gradients[0], saved, weights, biases, mask);
    result[0] = input;
    c10::SymInt row = 0;
    for (size_t i = 0; i < layers; ++i) {
      const auto rows = weights[i].sym_size(0);
      if (task_should_compute_output(1 + i)) result[1 + i] = weight.narrow_symint(0, row, rows);
      if (task_should_compute_output(1 + layers + i)) result[1 + layers + i] = bias.narrow_symint(0, row, rows);
      row = row + rows;
    }
    return result;
  }
  void collect_constants(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  /// The packed weights serve the input's gradient alone. Unless the graph is kept they go before the gradients of the
  /// weights come, which are twice as large: that is where a step's memory is fullest. In a capture all three gradients
  /// are made side by side instead.
  JointLinearGradients backward_of(const Tensor& grad, std::vector<Tensor>& saved, at::TensorList weights,
                                   at::TensorList biases, JointLinearMask mask) {
    const bool both = mask[0] && (mask[1] || mask[2]) && saved.back().dim() == 2;  // and there are packed weights
    const bool apart = both && !torch::autograd::get_current_graph_task_keep_graph() && !is_captured(grad);
    if (!apart) return joint_linear_backward(grad, saved[0], weights, biases, saved.back(), mask);
    auto input =
        std::get<0>(joint_linear_backward(grad, saved[0], weights, biases, saved.back(), {true, false, false}));
    const auto none = at::empty({0}, saved[0].options());
    let_go(saved.size() - 1, saved);
    const auto [nothing, weight, bias] =
        joint_linear_backward(grad, saved[0], weights, biases, none, {false, mask[1], mask[2]});
    return {input, weight, bias};
  }
};

Tensor joint_linear_autograd(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  if (any_tangent(input) || any_tangent_in(weights) || any_tangent_in(biases)) {
    check_joint_linear(input, weights, biases);
    return joint_linear_formula(input, weights, biases);
  }
  if (!torch::autograd::compute_requires_grad(input, weights, biases)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return joint_linear(input, weights, biases);
  }
  auto node = make_node<JointLinearBackward>(input, weights, biases);
  Tensor out, packed;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(out, packed) = joint_linear_forward(input, weights, biases);
  }
  std::vector<Tensor> saved{input};
  saved.insert(saved.end(), weights.begin(), weights.end());
  saved.insert(saved.end(), biases.begin(), biases.end());
  saved.push_back(packed);
  node->save_all(saved);
  torch::autograd::set_history(out, node);
  return out;
}

JointLinearGradients joint_linear_backward_autograd(const Tensor& grad, const Tensor& input, at::TensorList weights,
                                                    at::TensorList biases, const Tensor& packed, JointLinearMask mask) {
  if (torch::autograd::compute_requires_grad(grad, input, weights, biases) || any_tangent(grad, input) ||
      any_tangent_in(weights) || any_tangent_in(biases))
    return joint_linear_backward_formula(grad, input, weights, biases, mask);
  at::AutoDispatchBelowADInplaceOrView guard;
  return joint_linear_backward(grad, input, weights, biases, packed, mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("joint_linear", &joint_linear_autograd);
  m.impl("joint_linear_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("joint_linear_backward", &joint_linear_backward_autograd);
}

}  // namespace dpa
