// `dpa::joint_linear`: linear layers of one input, their outputs side by side, as one product. A U-Net's FiLM is one.
//
// 16-bit inputs take the products of kernels/conv1d on a Hopper GPU: each weight is packed from where it lies, and for
// the backward the packed form alone is kept. Everything else is one linear layer on the weights joined.
#pragma once
#include "ops/common/check.h"

namespace dpa {

/// Output, and the weights as the products read them: (sum of C_i, C_in padded) in the input's dtype, or no elements
/// where the products did not run.
using JointLinearForward = std::tuple<Tensor, Tensor>;
/// Gradients of the input, and of weights and biases side by side as the outputs are; undefined where the mask asks for
/// none.
using JointLinearGradients = std::tuple<Tensor, Tensor, Tensor>;
using JointLinearMask = std::array<bool, 3>;

void check_joint_linear(const Tensor& input, at::TensorList weights, at::TensorList biases);
void check_joint_linear_grad(const Tensor& grad, const Tensor& input, at::TensorList weights);

/// The sum of C_i.
c10::SymInt joint_outputs(at::TensorList weights);

/// Whether the packed weights are made: a matter of dtype, order and device alone, so that the Meta kernel knows it.
bool joint_linear_packs(const Tensor& input, at::TensorList weights);

/// Through the dispatcher.
Tensor joint_linear(const Tensor& input, at::TensorList weights, at::TensorList biases);
JointLinearForward joint_linear_forward(const Tensor& input, at::TensorList weights, at::TensorList biases);
JointLinearGradients joint_linear_backward(const Tensor& grad, const Tensor& input, at::TensorList weights,
                                           at::TensorList biases, const Tensor& packed, JointLinearMask output_mask);

/// The op and its backward in ATen ops, differentiable to any order.
Tensor joint_linear_formula(const Tensor& input, at::TensorList weights, at::TensorList biases);
JointLinearGradients joint_linear_backward_formula(const Tensor& grad, const Tensor& input, at::TensorList weights,
                                                   at::TensorList biases, JointLinearMask output_mask);

/// (N, C) as one sample of length N, which is channels-last in memory.
inline Tensor as_sample(const Tensor& rows) { return rows.t().unsqueeze(0); }

}  // namespace dpa
