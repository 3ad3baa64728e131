// `dpa::conv1d_gnm`: a 1-D convolution that keeps the length, then group_norm_mish.
#pragma once
#include "ops/common/check.h"
#include "ops/common/op.h"

namespace dpa {

void check_conv1d_gnm(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                      const OptionalTensor& gn_weight, const OptionalTensor& gn_bias, int64_t num_groups, double eps,
                      const OptionalTensor& scale, const OptionalTensor& shift,
                      const OptionalTensor& residual = std::nullopt);

/// Through the dispatcher.
inline constexpr Op<
    "conv1d_gnm", Tensor(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                         const OptionalTensor& gn_weight, const OptionalTensor& gn_bias, int64_t num_groups, double eps,
                         const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual)>
    conv1d_gnm;

/// The padding that keeps the length.
int64_t conv_padding(const Tensor& conv_weight);

}  // namespace dpa
