#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "ops/elementwise_mult/elementwise_mult.h"

namespace dpa {
namespace {

Tensor elementwise_mult_meta(const Tensor& a, const Tensor& b) {
  check_pair("elementwise_mult", "a", a, "b", b);
  return at::empty_like(a);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("elementwise_mult", &elementwise_mult_meta);
  m.impl("elementwise_mult.out", &check_elementwise_mult_out);
}

}  // namespace dpa
