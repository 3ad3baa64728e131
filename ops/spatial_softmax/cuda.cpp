#include <torch/library.h>

#include "ops/spatial_softmax/spatial_softmax.h"

namespace dpa {

TORCH_LIBRARY_IMPL(dpa, CUDA, m) { m.impl("spatial_softmax", &spatial_softmax_formula); }

}  // namespace dpa
