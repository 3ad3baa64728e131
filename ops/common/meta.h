// What Meta kernels answer: tensors without data, of symbolic sizes.
#pragma once
#include <ATen/ops/empty.h>

#include "ops/common/check.h"

namespace dpa {

/// A contiguous tensor of the shape, dtype and device of `tensor`; undefined if it is not wanted.
inline Tensor meta_like(const Tensor& tensor, bool wanted = true) {
  return wanted ? at::empty_symint(tensor.sym_sizes(), tensor.options()) : Tensor();
}
inline Tensor meta_like(const OptionalTensor& tensor, bool wanted) {
  return wanted && tensor.has_value() ? meta_like(*tensor) : Tensor();
}

}  // namespace dpa
