// `dpa::joint_linear` and its backward in ATen ops: what forward-mode AD and second derivatives differentiate, and what
// runs wherever the products do not.
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "ops/joint_linear/joint_linear.h"

namespace dpa {
namespace {

/// The CPU's products of float16 add in it: they get such values in float32.
Tensor summable(const Tensor& tensor, const Tensor& input) {
  const auto same = tensor.to(input.scalar_type());
  return input.is_cpu() && input.scalar_type() == at::kHalf ? same.to(at::kFloat) : same;
}

}  // namespace

Tensor joint_linear_formula(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  const auto out =
      at::linear(summable(input, input), summable(at::cat(weights), input), summable(at::cat(biases), input));
  return out.to(input.scalar_type());
}

JointLinearGradients joint_linear_backward_formula(const Tensor& grad_, const Tensor& input, at::TensorList weights,
                                                   at::TensorList biases, JointLinearMask mask) {
  const auto grad = summable(grad_, input);
  Tensor grad_input, grad_weight, grad_bias;
  if (mask[0]) grad_input = at::mm(grad, summable(at::cat(weights), input)).to(input.scalar_type());
  if (mask[1]) grad_weight = at::mm(grad.t(), summable(input, input)).to(weights[0].scalar_type());
  if (mask[2]) grad_bias = grad.sum(0).to(biases[0].scalar_type());
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace dpa
