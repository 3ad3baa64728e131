#include <c10/util/Exception.h>
#include <torch/library.h>

#include "test/ops/own_op/swiglu.h"

TORCH_LIBRARY(own, m) {
  m.def("swiglu(Tensor gate, Tensor value) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor value) -> (Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
}

namespace own {

void check(const Tensor& gate, const Tensor& value) {
  const auto type = gate.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16,
              "own::swiglu: gate must be float64, float32, float16 or bfloat16, got ", type);
  TORCH_CHECK(value.scalar_type() == type, "own::swiglu: value must have the dtype of gate (", type, "), got ",
              value.scalar_type());
  TORCH_CHECK(value.device() == gate.device(), "own::swiglu: value must be on the device of gate (", gate.device(),
              "), got ", value.device());
  // Symbolic sizes: under torch.compile the comparison becomes a guard and pins no size to its value.
  TORCH_CHECK(value.sym_sizes().equals(gate.sym_sizes()), "own::swiglu: value must have the shape of gate ",
              gate.sym_sizes(), ", got ", value.sym_sizes());
}

}  // namespace own
