// `dpa::spatial_softmax`: where a softmax over the pixels of each feature map has its mean, a keypoint a channel.
#pragma once
#include "ops/common/check.h"
#include "ops/common/op.h"

namespace dpa {

/// Through the dispatcher.
inline constexpr Op<"spatial_softmax", Tensor(const Tensor& input, const OptionalTensor& temperature)> spatial_softmax;

void check_spatial_softmax(const Tensor& input, const OptionalTensor& temperature);

/// The op in ATen ops.
Tensor spatial_softmax_formula(const Tensor& input, const OptionalTensor& temperature);

}  // namespace dpa
