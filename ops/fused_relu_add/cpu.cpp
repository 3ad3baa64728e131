#include <torch/library.h>

#include "ops/fused_relu_add/fused_relu_add.h"

namespace dpa {
namespace {

Tensor fused_relu_add_cpu(const Tensor& x, const Tensor& y, double bias) {
  check_pair("fused_relu_add", "x", x, "y", y);
  // The comparison is that way round so that NaN stays NaN.
  return binary_cpu(x, y, [bias](auto u, auto v) { return (u < 0 ? decltype(u)(0) : u) + v + decltype(u)(bias); });
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) { m.impl("fused_relu_add", &fused_relu_add_cpu); }

}  // namespace dpa
