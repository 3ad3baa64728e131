#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "kernels/cuda/fused_relu_add/fused_relu_add.h"
#include "ops/common/elementwise_cuda.h"
#include "ops/fused_relu_add/fused_relu_add.h"

namespace dpa {
namespace {

Tensor fused_relu_add_cuda(const Tensor& x, const Tensor& y, double bias) {
  check_pair("fused_relu_add", "x", x, "y", y);
  auto out = at::empty_like(x);
  auto iterator = binary_iterator(out, x, y);
  binary_cuda("fused_relu_add", "x", iterator, [bias](const kernels::Elementwise& args, cudaStream_t stream) {
    return kernels::fused_relu_add(args, bias, stream);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) { m.impl("fused_relu_add", &fused_relu_add_cuda); }

}  // namespace dpa
