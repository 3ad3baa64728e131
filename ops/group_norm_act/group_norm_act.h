// `dpa::group_norm_act`: relu(group_norm(input) * weight + bias + residual), the ReLU optional.
//
// The output has the order of the input, contiguous or a channels-last image (ops/common/strides.h), and so has the
// input's gradient. weight and bias may be float32 beside 16-bit activations, so that training casts no parameters.
#pragma once
#include "ops/common/check.h"
#include "ops/common/op.h"

namespace dpa {

/// Gradients of input, weight, bias and residual; undefined where the mask is false.
using NormActGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using NormActMask = std::array<bool, 4>;

/// Through the dispatcher.
inline constexpr Op<"group_norm_act",
                    Tensor(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, const OptionalTensor& residual, bool relu)>
    group_norm_act;
inline constexpr Op<"group_norm_act_backward",
                    NormActGradients(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                     const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                     const OptionalTensor& residual, bool relu, NormActMask output_mask)>
    group_norm_act_backward;

/// The op and its backward in ATen ops, checked, differentiable to any order.
Tensor group_norm_act_formula(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                              const OptionalTensor& bias, double eps, const OptionalTensor& residual, bool relu);
NormActGradients group_norm_act_backward_formula(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                                 const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                                 const OptionalTensor& residual, bool relu, NormActMask output_mask);

/// The same as kernels: empty images too are in the order of the input.
Tensor group_norm_act_by_aten(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                              const OptionalTensor& bias, double eps, const OptionalTensor& residual, bool relu);
NormActGradients group_norm_act_backward_by_aten(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                                 const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                                 const OptionalTensor& residual, bool relu, NormActMask output_mask);

}  // namespace dpa
