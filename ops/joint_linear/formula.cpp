// `dpa::joint_linear` and its backward in ATen ops: what forward-mode AD and second derivatives differentiate, and what
// runs wherever the GEMMs do not.
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/mm.h>

#include "ops/common/mish.h"
#include "ops/joint_linear/joint_linear.h"

namespace dpa {
namespace {

/// GEMMs of float16 on the CPU accumulate in float16: they get such values in float32.
Tensor summable(const Tensor& tensor, const Tensor& input) {
  const auto same = tensor.to(input.scalar_type());
  return input.is_cpu() && input.scalar_type() == at::kHalf ? same.to(at::kFloat) : same;
}

}  // namespace

Tensor whole_input(const Tensor& input, const OptionalTensor& rest, bool mish) {
  const auto whole = rest.has_value() ? at::cat({input, *rest}, 1) : input;
  return mish ? at::mish(whole) : whole;
}

Tensor joint_linear_formula(const Tensor& input, at::TensorList weights, at::TensorList biases,
                            const OptionalTensor& rest, bool mish) {
  const auto out = at::linear(summable(whole_input(input, rest, mish), input), summable(at::cat(weights), input),
                              summable(at::cat(biases), input));
  return out.to(input.scalar_type());
}

JointLinearGradients joint_linear_backward_formula(const Tensor& grad_, const Tensor& input, at::TensorList weights,
                                                   at::TensorList biases, const OptionalTensor& rest,
                                                   JointLinearMask mask, bool mish) {
  const auto grad = summable(grad_, input);
  const auto of_part = [&](const Tensor& part, const c10::SymInt& first) {
    std::vector<Tensor> columns;
    for (const auto& weight : weights) columns.push_back(weight.narrow_symint(1, first, part.sym_size(1)));
    const auto sums = at::mm(grad, summable(at::cat(columns), input)).to(input.scalar_type());
    if (!mish) return sums;
    const auto type = accumulate_type(input.scalar_type());
    return (sums.to(type) * mish_derivative(part.to(type))).to(input.scalar_type());
  };
  Tensor grad_input, grad_weight, grad_bias, grad_rest;
  if (mask[0]) grad_input = of_part(input, 0);
  if (mask[1])
    grad_weight = at::mm(grad.t(), summable(whole_input(input, rest, mish), input)).to(weights[0].scalar_type());
  if (mask[2]) grad_bias = grad.sum(0).to(biases[0].scalar_type());
  if (mask[3] && rest.has_value()) grad_rest = of_part(*rest, input.sym_size(1));
  return {grad_input, grad_weight, grad_bias, grad_rest};
}

}  // namespace dpa
