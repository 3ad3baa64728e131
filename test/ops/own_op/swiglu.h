// `own::swiglu`: silu(gate) * value.
#pragma once
#include <ATen/core/Tensor.h>

#include <tuple>

#include "ops/common/op.h"

namespace own {

using at::Tensor;

/// Raises unless `value` matches `gate`, which is floating. Called by every backend.
void check(const Tensor& gate, const Tensor& value);

/// Through the dispatcher.
inline constexpr dpa::Op<"own::swiglu", Tensor(const Tensor& gate, const Tensor& value)> swiglu;
inline constexpr dpa::Op<"own::swiglu_backward",
                         std::tuple<Tensor, Tensor>(const Tensor& grad, const Tensor& gate, const Tensor& value)>
    swiglu_backward;

}  // namespace own
