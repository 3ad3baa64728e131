#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/joint_linear/joint_linear.h"

namespace dpa {
namespace {

Tensor joint_linear_meta(const Tensor& input, at::TensorList weights, at::TensorList biases, const OptionalTensor& rest,
                         bool /*mish*/) {
  check_joint_linear(input, weights, biases, rest);
  return at::empty_symint({input.sym_size(0), joint_outputs(weights)}, input.options());
}

JointLinearGradients joint_linear_backward_meta(const Tensor& grad, const Tensor& input, at::TensorList weights,
                                                at::TensorList biases, const OptionalTensor& rest, JointLinearMask mask,
                                                bool /*mish*/) {
  check_joint_linear(input, weights, biases, rest);
  check_joint_linear_grad(grad, input, weights);
  const auto outputs = joint_outputs(weights);
  const auto empty = [](c10::SymIntArrayRef sizes, const Tensor& like) {
    return at::empty_symint(sizes, like.options());
  };
  return {mask[0] ? empty(input.sym_sizes(), input) : Tensor(),
          mask[1] ? empty({outputs, weights[0].sym_size(1)}, weights[0]) : Tensor(),
          mask[2] ? empty({outputs}, biases[0]) : Tensor(),
          mask[3] && rest.has_value() ? empty(rest->sym_sizes(), *rest) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("joint_linear", &joint_linear_meta);
  m.impl("joint_linear_backward", &joint_linear_backward_meta);
}

}  // namespace dpa
