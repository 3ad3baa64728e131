#include <torch/library.h>

#include "ops/common/strides.h"
#include "ops/weights_in_order/weights_in_order.h"

namespace dpa {
namespace {

std::vector<Tensor> weights_in_order_cpu(at::TensorList weights, at::ScalarType dtype, bool channels_last) {
  check_weights_in_order(weights, dtype);
  std::vector<Tensor> copies;
  for (const auto& weight : weights)
    copies.push_back(empty_image_like(weight, channels_last, weight.options().dtype(dtype)).copy_(weight));
  return copies;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) { m.impl("weights_in_order", &weights_in_order_cpu); }

}  // namespace dpa
