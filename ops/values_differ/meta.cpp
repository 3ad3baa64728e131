#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/values_differ/values_differ.h"

namespace dpa {
namespace {

Tensor values_differ_meta(at::TensorList values, const Tensor& kept) {
  check_values_differ(values, kept);
  return at::empty({}, kept.options().dtype(at::kBool));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) { m.impl("values_differ", &values_differ_meta); }

}  // namespace dpa
