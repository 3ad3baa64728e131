// `dpa::conv2d_norm_act`: a 2-D convolution and what follows it in an image encoder: GroupNorm, or a scale and shift a
// channel, which is a BatchNorm in evaluation; a residual sum; ReLU.
#pragma once
#include "ops/common/check.h"
#include "ops/common/op.h"
#include "ops/conv2d/conv2d.h"

namespace dpa {

/// Through the dispatcher.
inline constexpr Op<"conv2d_norm_act",
                    Tensor(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual,
                           int64_t num_groups, double eps, int64_t stride, int64_t padding, bool relu)>
    conv2d_norm_act;

void check_conv2d_norm_act(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual,
                           int64_t num_groups, double eps, int64_t stride, int64_t padding);

/// The op in ATen ops, in the order that these give it.
Tensor conv2d_norm_act_formula(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual,
                               int64_t num_groups, double eps, int64_t stride, int64_t padding, bool relu);

}  // namespace dpa
