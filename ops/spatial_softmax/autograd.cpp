// Where a gradient or a tangent is wanted, the op is its formula.
#include <torch/library.h>

#include "ops/common/autocast.h"
#include "ops/common/node.h"
#include "ops/spatial_softmax/spatial_softmax.h"

namespace dpa {

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("spatial_softmax", formula_autograd<spatial_softmax, &spatial_softmax_formula>);
}

DPA_AUTOCAST(spatial_softmax, InFloat)

}  // namespace dpa
