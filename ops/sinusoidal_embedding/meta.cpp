#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/sinusoidal_embedding/sinusoidal_embedding.h"

namespace dpa {
namespace {

Tensor sinusoidal_embedding_meta(const Tensor& timesteps, c10::SymInt dim, const OptionalDtype& dtype) {
  check_sinusoidal_embedding(timesteps, dim, dtype);
  auto sizes = timesteps.sym_sizes().vec();
  sizes.push_back(dim);
  return at::empty_symint(sizes, timesteps.options().dtype(result_dtype(timesteps, dtype)));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) { m.impl("sinusoidal_embedding", &sinusoidal_embedding_meta); }

}  // namespace dpa
