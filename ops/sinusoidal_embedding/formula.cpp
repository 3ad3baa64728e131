#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include "ops/sinusoidal_embedding/sinusoidal_embedding.h"

namespace dpa {

Tensor sinusoidal_embedding_formula(const Tensor& timesteps, c10::SymInt dim, const OptionalDtype& dtype) {
  check_sinusoidal_embedding(timesteps, dim, dtype);
  const auto wide = angle_dtype(timesteps);
  const int64_t size = dim.guard_int(__FILE__, __LINE__);
  const auto place = at::arange(size / 2, timesteps.options().dtype(wide));
  const auto angles = timesteps.to(wide).unsqueeze(-1) * (place * log_frequency_step(size)).exp();
  return at::cat({angles.sin(), angles.cos()}, -1).to(result_dtype(timesteps, dtype));
}

}  // namespace dpa
