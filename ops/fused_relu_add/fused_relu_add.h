// `dpa::fused_relu_add`: relu(x) + y + bias.
#pragma once
#include "ops/common/elementwise.h"
#include "ops/common/op.h"

namespace dpa {

/// Through the dispatcher.
inline constexpr Op<"fused_relu_add", Tensor(const Tensor& x, const Tensor& y, double bias)> fused_relu_add;

}  // namespace dpa
