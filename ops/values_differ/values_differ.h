// `dpa::values_differ`: whether a byte of `values`, one after the other, is another than in `kept`. dpa.tracking asks it
// before every call of a network whose weights are packed: `values` are views of elements spread over the weights. Equal
// bytes are equal values, a NaN among them too.
#pragma once
#include "ops/common/check.h"

namespace dpa {

/// `values` have at most one dimension and any dtype, `kept` as many bytes as all of them.
void check_values_differ(at::TensorList values, const Tensor& kept);

}  // namespace dpa
