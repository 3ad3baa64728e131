#include "ops/weights_in_order/weights_in_order.h"

namespace dpa {

void check_weights_in_order(at::TensorList weights, at::ScalarType dtype) {
  constexpr const char* op = "weights_in_order";
  DPA_CHECK(at::isFloatingType(dtype) && (dtype == at::kDouble || accumulate_type(dtype) == at::kFloat), op,
            "dtype must be float64, float32, float16 or bfloat16", dtype);
  for (const auto& weight : weights) {
    check_floating(op, "weights", weight);
    DPA_CHECK(weight.dim() == 4, op, "weights must have 4 dimensions (O, C, KH, KW)", "shape ", weight.sym_sizes());
    check_same_device(op, "weights", weight, "the first one", weights[0]);
  }
}

}  // namespace dpa
