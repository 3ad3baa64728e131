#include <torch/library.h>

#include "ops/elementwise_mult/elementwise_mult.h"

namespace dpa {
namespace {

constexpr auto multiply = [](auto x, auto y) { return x * y; };

Tensor elementwise_mult_cpu(const Tensor& a, const Tensor& b) {
  check_pair("elementwise_mult", "a", a, "b", b);
  return binary_cpu(a, b, multiply);
}

void elementwise_mult_out_cpu(const Tensor& a, const Tensor& b, const Tensor& out) {
  check_elementwise_mult_out(a, b, out);
  auto iterator = binary_iterator(out, a, b);
  binary_cpu(iterator, multiply);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("elementwise_mult", &elementwise_mult_cpu);
  m.impl("elementwise_mult.out", &elementwise_mult_out_cpu);
}

}  // namespace dpa
