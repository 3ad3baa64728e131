// `own::swiglu`: silu(gate) * value.
#pragma once
#include <ATen/core/Tensor.h>

#include <tuple>

namespace own {

using at::Tensor;

/// Raises unless `value` matches `gate`, which is floating. Called by every backend.
void check(const Tensor& gate, const Tensor& value);

/// Through the dispatcher.
Tensor swiglu(const Tensor& gate, const Tensor& value);
std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad, const Tensor& gate, const Tensor& value);

}  // namespace own
