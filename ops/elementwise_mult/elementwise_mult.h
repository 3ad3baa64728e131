// `dpa::elementwise_mult`: a * b, and its variant that writes into `out`.
#pragma once
#include "ops/common/elementwise.h"
#include "ops/common/op.h"

namespace dpa {

/// The check of `elementwise_mult.out` beyond that of its inputs.
void check_elementwise_mult_out(const Tensor& a, const Tensor& b, const Tensor& out);

/// Through the dispatcher.
inline constexpr Op<"elementwise_mult", Tensor(const Tensor& a, const Tensor& b)> elementwise_mult;
inline constexpr Op<"elementwise_mult.out", void(const Tensor& a, const Tensor& b, const Tensor& out)>
    elementwise_mult_out;

}  // namespace dpa
