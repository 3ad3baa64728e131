// `dpa::joint_linear`: linear layers of one input, their outputs side by side, as one GEMM. A U-Net's FiLM is one.
//
// The input may come in two parts, of which often one alone wants a gradient: a timestep's embedding, say, beside
// features that are given. 16-bit inputs take the GEMMs of kernels/cuda/conv1d on a Hopper GPU: each weight is packed
// from where it lies, forward and again, as far as is wanted, for the input's gradient, so that nothing but the
// arguments is kept in between. Everything else is one linear layer on the weights joined.
//
// With `mish` the layers read mish(input) and mish(rest). It is part of the kernel that writes the GEMM's rows, and its
// slope is a kernel that a captured backward launches before what other branches have waiting.
#pragma once
#include "ops/common/check.h"
#include "ops/common/op.h"

namespace dpa {

/// Gradients of the input, of weights and biases side by side as the outputs are, and of the rest of the input;
/// undefined where the mask is false.
using JointLinearGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using JointLinearMask = std::array<bool, 4>;

void check_joint_linear(const Tensor& input, at::TensorList weights, at::TensorList biases, const OptionalTensor& rest);
void check_joint_linear_grad(const Tensor& grad, const Tensor& input, at::TensorList weights);

/// The sum of C_i.
c10::SymInt joint_outputs(at::TensorList weights);
/// What the layers read: the input in one piece, or its Mish.
Tensor whole_input(const Tensor& input, const OptionalTensor& rest, bool mish);

/// Through the dispatcher.
inline constexpr Op<"joint_linear", Tensor(const Tensor& input, at::TensorList weights, at::TensorList biases,
                                           const OptionalTensor& rest, bool mish)>
    joint_linear;
inline constexpr Op<"joint_linear_backward",
                    JointLinearGradients(const Tensor& grad, const Tensor& input, at::TensorList weights,
                                         at::TensorList biases, const OptionalTensor& rest, JointLinearMask output_mask,
                                         bool mish)>
    joint_linear_backward;

/// The op and its backward in ATen ops, differentiable to any order.
Tensor joint_linear_formula(const Tensor& input, at::TensorList weights, at::TensorList biases,
                            const OptionalTensor& rest, bool mish);
JointLinearGradients joint_linear_backward_formula(const Tensor& grad, const Tensor& input, at::TensorList weights,
                                                   at::TensorList biases, const OptionalTensor& rest,
                                                   JointLinearMask output_mask, bool mish);

}  // namespace dpa
