// `dpa::fused_relu_add`: relu(x) + y + bias.
#pragma once
#include "ops/common/elementwise.h"

namespace dpa {

/// Through the dispatcher.
Tensor fused_relu_add(const Tensor& x, const Tensor& y, double bias);

}  // namespace dpa
