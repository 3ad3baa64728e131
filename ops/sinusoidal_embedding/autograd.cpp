#include <torch/library.h>

#include "ops/common/autocast.h"
#include "ops/common/node.h"
#include "ops/sinusoidal_embedding/sinusoidal_embedding.h"

namespace dpa {
namespace {

/// Timesteps and angles stay as they are.
Tensor sinusoidal_embedding_autocast(const Autocast&, const Tensor& timesteps, c10::SymInt dim,
                                     const OptionalDtype& dtype) {
  return sinusoidal_embedding(timesteps, dim, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("sinusoidal_embedding", formula_autograd<sinusoidal_embedding, &sinusoidal_embedding_formula>);
}

DPA_AUTOCAST(sinusoidal_embedding, With<sinusoidal_embedding_autocast>)

}  // namespace dpa
