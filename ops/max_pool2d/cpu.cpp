// On the CPU the ops are ATen's, in the order of the input.
#include <torch/library.h>

#include "ops/max_pool2d/max_pool2d.h"

namespace dpa {
namespace {

Tensor max_pool2d_cpu(const Tensor& input, int64_t kernel_size, int64_t stride, int64_t padding) {
  return std::get<0>(max_pool2d_by_aten(input, kernel_size, stride, padding));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("max_pool2d", &max_pool2d_cpu);
  m.impl("max_pool2d_forward", &max_pool2d_by_aten);
  m.impl("max_pool2d_backward", &max_pool2d_backward_by_aten);
}

}  // namespace dpa
