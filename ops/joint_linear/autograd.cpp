#include <torch/library.h>

#include <algorithm>

#include "ops/common/autocast.h"
#include "ops/common/later_join.h"
#include "ops/common/node.h"
#include "ops/joint_linear/joint_linear.h"

namespace dpa {
namespace {

/// Saves input, weights, biases and the rest, in this order, which is that of its edges.
struct JointLinearBackward : SavingNode<JointLinearBackward, 0, bool> {
  std::string name() const override { return "JointLinearBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted, bool mish) {
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
    const LaterJoin later(gradients[0]);
    std::tie(result.front(), weight, bias, result.back()) =
        joint_linear_backward(gradients[0], saved[0], weights, biases, as_optional(rest), mask, mish);
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
                             const OptionalTensor& rest, bool mish) {
  if (any_tangent(input, weights, biases, rest)) {
    check_joint_linear(input, weights, biases, rest);
    return joint_linear_formula(input, weights, biases, rest, mish);
  }
  const auto node = node_if_wanted<JointLinearBackward>(input, weights, biases, rest);
  auto out = below_autograd(joint_linear, input, weights, biases, rest, mish);
  if (!node) return out;
  std::vector<Tensor> saved{input};
  saved.insert(saved.end(), weights.begin(), weights.end());
  saved.insert(saved.end(), biases.begin(), biases.end());
  saved.push_back(value_or_undefined(rest));
  node->save_all(saved), node->constants = {mish};
  return with_history(std::move(out), node);
}

/// Under autocast the input comes in the region's 16-bit dtype. Parameters that are all float32 stay as they are, as
/// those of `dpa::conv1d`; others come in the input's dtype, since the op takes one dtype for all of them.
Tensor joint_linear_autocast(const Autocast& cast, const Tensor& input, at::TensorList weights, at::TensorList biases,
                             const OptionalTensor& rest, bool mish) {
  const auto narrow = cast(input);
  const auto wide = [](const Tensor& tensor) { return tensor.scalar_type() == at::kFloat; };
  const bool stay =
      std::all_of(weights.begin(), weights.end(), wide) && std::all_of(biases.begin(), biases.end(), wide);
  const auto parameters = [&](at::TensorList tensors) {
    std::vector<Tensor> result;
    for (const auto& tensor : tensors) result.push_back(stay ? cast.parameter(tensor, narrow) : cast(tensor));
    return result;
  };
  return joint_linear(narrow, parameters(weights), parameters(biases), cast(rest), mish);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("joint_linear", &joint_linear_autograd);
  m.impl("joint_linear_backward", formula_autograd<joint_linear_backward, &joint_linear_backward_formula>);
}

DPA_AUTOCAST(joint_linear, With<joint_linear_autocast>)

}  // namespace dpa
