#include <torch/library.h>

#include "ops/joint_linear/joint_linear.h"

namespace dpa {
namespace {

Tensor joint_linear_cpu(const Tensor& input, at::TensorList weights, at::TensorList biases, const OptionalTensor& rest,
                        bool mish) {
  check_joint_linear(input, weights, biases, rest);
  return joint_linear_formula(input, weights, biases, rest, mish);
}

JointLinearGradients joint_linear_backward_cpu(const Tensor& grad, const Tensor& input, at::TensorList weights,
                                               at::TensorList biases, const OptionalTensor& rest, JointLinearMask mask,
                                               bool mish) {
  check_joint_linear(input, weights, biases, rest);
  check_joint_linear_grad(grad, input, weights);
  return joint_linear_backward_formula(grad, input, weights, biases, rest, mask, mish);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("joint_linear", &joint_linear_cpu);
  m.impl("joint_linear_backward", &joint_linear_backward_cpu);
}

}  // namespace dpa
