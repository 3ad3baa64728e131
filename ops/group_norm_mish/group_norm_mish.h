// `dpa::group_norm_mish`: mish(group_norm(input)) * scale + shift.
#pragma once
#include "ops/common/check.h"

namespace dpa {

/// Gradients of input, weight, bias, scale and shift; undefined where the mask asks for none.
using NormGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using NormMask = std::array<bool, 5>;

/// The check of the op and of everything that ends in it; `op` is the name in the messages.
void check_group_norm_mish(const char* op, const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                           const OptionalTensor& shift);

/// Through the dispatcher.
Tensor group_norm_mish(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                       const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                       const OptionalTensor& shift);
NormGradients group_norm_mish_backward(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                       const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                       const OptionalTensor& scale, const OptionalTensor& shift, NormMask output_mask);

/// The op and its backward in ATen ops, differentiable to any order.
Tensor group_norm_mish_formula(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                               const OptionalTensor& shift);
NormGradients group_norm_mish_backward_formula(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                               const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                               const OptionalTensor& scale, const OptionalTensor& shift,
                                               NormMask output_mask);

/// The kernels, on checked arguments, for ops that end in this one.
Tensor group_norm_mish_cpu(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                           const OptionalTensor& shift);
Tensor group_norm_mish_cuda(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                            const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                            const OptionalTensor& shift);

}  // namespace dpa
