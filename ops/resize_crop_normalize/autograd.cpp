// Where a gradient or a tangent is wanted, the op is its formula.
#include <torch/library.h>

#include "ops/common/autocast.h"
#include "ops/common/node.h"
#include "ops/resize_crop_normalize/resize_crop_normalize.h"

namespace dpa {

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("resize_crop_normalize", formula_autograd<resize_crop_normalize, &resize_crop_normalize_formula>);
}

DPA_AUTOCAST(resize_crop_normalize, InFloat)

}  // namespace dpa
