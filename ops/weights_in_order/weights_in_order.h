// `dpa::weights_in_order`: copies of convolutions' weights, (O, C, KH, KW), or of their gradients, in a dtype,
// channels-last or contiguous. A step in training copies the weights of a whole network and their gradients back: a
// launch each way instead of two a weight.
#pragma once
#include "ops/common/check.h"

namespace dpa {

void check_weights_in_order(at::TensorList weights, at::ScalarType dtype);

}  // namespace dpa
