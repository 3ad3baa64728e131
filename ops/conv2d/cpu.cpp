#include <torch/library.h>

#include "ops/conv2d/conv2d.h"

namespace dpa {

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("conv2d", &conv2d_by_aten);
  m.impl("conv2d_backward", &conv2d_backward_by_aten);
}

}  // namespace dpa
