#include <torch/library.h>

#include "ops/sinusoidal_embedding/sinusoidal_embedding.h"

namespace dpa {
namespace {

Tensor sinusoidal_embedding_cpu(const Tensor& timesteps, int64_t dim, const OptionalDtype& dtype) {
  return sinusoidal_embedding_formula(timesteps, dim, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) { m.impl("sinusoidal_embedding", &sinusoidal_embedding_cpu); }

}  // namespace dpa
