// `dpa::group_norm_mish`: mish(group_norm(input)) * scale + shift + residual.
//
// The output has the order of the input, contiguous or channels-last (ops/common/strides.h), and so has the input's
// gradient. weight and bias may be float32 beside 16-bit activations, so that training casts no parameters.
#pragma once
#include "ops/common/check.h"
#include "ops/common/op.h"
#include "ops/common/strides.h"

namespace dpa {

/// Gradients of input, weight, bias, scale and shift; undefined where the mask is false.
using NormGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using NormMask = std::array<bool, 5>;

/// The check of the op and of everything that ends in it; `op` is the name in the messages.
void check_group_norm_mish(const char* op, const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                           const OptionalTensor& shift, const OptionalTensor& residual = std::nullopt);

/// Through the dispatcher.
inline constexpr Op<"group_norm_mish", Tensor(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                                              const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                                              const OptionalTensor& shift, const OptionalTensor& residual)>
    group_norm_mish;
inline constexpr Op<"group_norm_mish_backward",
                    NormGradients(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                  const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                  const OptionalTensor& scale, const OptionalTensor& shift, NormMask output_mask)>
    group_norm_mish_backward;

/// The op and its backward in ATen ops, differentiable to any order.
Tensor group_norm_mish_formula(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                               const OptionalTensor& shift, const OptionalTensor& residual = std::nullopt);
NormGradients group_norm_mish_backward_formula(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                               const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                               const OptionalTensor& scale, const OptionalTensor& shift,
                                               NormMask output_mask);

/// The kernels, on checked arguments, for ops that end in this one.
Tensor group_norm_mish_cpu(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                           const OptionalTensor& shift, const OptionalTensor& residual = std::nullopt);
Tensor group_norm_mish_cuda(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                            const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                            const OptionalTensor& shift, const OptionalTensor& residual = std::nullopt);

}  // namespace dpa
