// What Meta kernels answer: tensors without data, of symbolic sizes.
#pragma once
#include <ATen/ops/empty.h>

#include "ops/common/check.h"
#include "ops/common/strides.h"

namespace dpa {

/// A contiguous tensor of the shape, dtype and device of `tensor`; undefined if it is not wanted.
inline Tensor meta_like(const Tensor& tensor, bool wanted = true) {
  return wanted ? at::empty_symint(tensor.sym_sizes(), tensor.options()) : Tensor();
}
inline Tensor meta_like(const OptionalTensor& tensor, bool wanted) {
  return wanted && tensor.has_value() ? meta_like(*tensor) : Tensor();
}

/// Of the shape, dtype and order of `input`, contiguous or a channels-last image; undefined if it is not wanted.
inline Tensor meta_in_order(const Tensor& input, bool wanted = true) {
  if (!wanted || !is_channels_last_image(input)) return meta_like(input, wanted);
  const auto sizes = input.sym_sizes();
  return empty_image(sizes[0], sizes[1], sizes[2], sizes[3], true, input.options());
}

}  // namespace dpa
