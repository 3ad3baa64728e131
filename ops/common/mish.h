// The derivative of Mish in differentiable ops; ATen's own has no derivative.
#pragma once
#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/tanh.h>

namespace dpa {

/// d mish(u) / du = tanh(softplus(u)) + u * sigmoid(u) * (1 - tanh(softplus(u))^2)
inline at::Tensor mish_derivative(const at::Tensor& u) {
  const auto t = at::tanh(at::softplus(u));
  return t + u * at::sigmoid(u) * (1 - t * t);
}

}  // namespace dpa
