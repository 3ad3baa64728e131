// `dpa::sinusoidal_embedding`: sines, then cosines, of the timesteps at dim / 2 frequencies from 1 down to 1e-4, as the
// diffusion_step_encoder of a U-Net begins with.
//
//   out[.., i]           = sin(timesteps[..] exp(-i ln(10000) / (dim / 2 - 1)))
//   out[.., dim / 2 + i] = cos(timesteps[..] exp(-i ln(10000) / (dim / 2 - 1)))
//
// Angles reach 1000 radians, which 16 bits do not resolve: they are float32, and float64 of float64 timesteps.
#pragma once
#include "ops/common/check.h"
#include "ops/common/op.h"

namespace dpa {

using OptionalDtype = std::optional<at::ScalarType>;

void check_sinusoidal_embedding(const Tensor& timesteps, const c10::SymInt& dim, const OptionalDtype& dtype);
inline at::ScalarType angle_dtype(const Tensor& timesteps) {
  return timesteps.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}
/// Of the result: where none is given that of floating timesteps, float32 of integers.
inline at::ScalarType result_dtype(const Tensor& timesteps, const OptionalDtype& dtype) {
  const auto type = timesteps.scalar_type();
  return dtype.value_or(at::isFloatingType(type) ? type : at::kFloat);
}
/// From one frequency's logarithm to the next.
inline double log_frequency_step(int64_t dim) { return -std::log(10000.0) / static_cast<double>(dim / 2 - 1); }

/// The op in ATen ops, differentiable to any order.
Tensor sinusoidal_embedding_formula(const Tensor& timesteps, c10::SymInt dim, const OptionalDtype& dtype);

/// Through the dispatcher.
inline constexpr Op<"sinusoidal_embedding",
                    Tensor(const Tensor& timesteps, c10::SymInt dim, const OptionalDtype& dtype)>
    sinusoidal_embedding;

}  // namespace dpa
