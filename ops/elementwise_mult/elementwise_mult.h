// `dpa::elementwise_mult`: a * b, and its variant that writes into `out`.
#pragma once
#include "ops/common/elementwise.h"

namespace dpa {

/// The check of `elementwise_mult.out` beyond that of its inputs.
void check_elementwise_mult_out(const Tensor& a, const Tensor& b, const Tensor& out);

/// Through the dispatcher.
Tensor elementwise_mult(const Tensor& a, const Tensor& b);
void elementwise_mult_out(const Tensor& a, const Tensor& b, const Tensor& out);

}  // namespace dpa
