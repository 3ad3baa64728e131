#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/spatial_softmax/spatial_softmax.h"

namespace dpa {
namespace {

Tensor spatial_softmax_meta(const Tensor& input, const OptionalTensor& temperature) {
  check_spatial_softmax(input, temperature);
  return at::empty_symint({input.sym_size(0), input.sym_size(1), 2}, input.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) { m.impl("spatial_softmax", &spatial_softmax_meta); }

}  // namespace dpa
