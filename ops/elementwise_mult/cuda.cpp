#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "kernels/cuda/elementwise_mult/elementwise_mult.h"
#include "ops/common/elementwise_cuda.h"
#include "ops/elementwise_mult/elementwise_mult.h"

namespace dpa {
namespace {

void multiply_cuda(const Tensor& a, const Tensor& b, const Tensor& out) {
  auto iterator = binary_iterator(out, a, b);
  binary_cuda("elementwise_mult", "a", iterator, &kernels::elementwise_mult);
}

Tensor elementwise_mult_cuda(const Tensor& a, const Tensor& b) {
  check_pair("elementwise_mult", "a", a, "b", b);
  auto out = at::empty_like(a);
  multiply_cuda(a, b, out);
  return out;
}

void elementwise_mult_out_cuda(const Tensor& a, const Tensor& b, const Tensor& out) {
  check_elementwise_mult_out(a, b, out);
  multiply_cuda(a, b, out);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("elementwise_mult", &elementwise_mult_cuda);
  m.impl("elementwise_mult.out", &elementwise_mult_out_cuda);
}

}  // namespace dpa
