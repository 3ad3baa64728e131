#include "ops/values_differ/values_differ.h"

namespace dpa {

void check_values_differ(at::TensorList values, const Tensor& kept) {
  constexpr const char* op = "values_differ";
  DPA_CHECK(kept.scalar_type() == at::kByte && kept.dim() == 1 && kept.is_contiguous(), op,
            "kept must be contiguous bytes of one dimension", kept.scalar_type(), " ", kept.sym_sizes());
  c10::SymInt bytes = 0;
  for (const auto& value : values) {
    DPA_CHECK(value.dim() <= 1, op, "values must have at most one dimension each", "shape ", value.sym_sizes());
    DPA_CHECK(value.layout() == at::kStrided, op, "values must be strided", value.layout());
    check_same_device(op, "values", value, "kept", kept);
    bytes = bytes + value.sym_numel() * static_cast<int64_t>(value.element_size());
  }
  DPA_CHECK(kept.sym_size(0) == bytes, op, c10::str("kept must have the ", bytes, " bytes of values"),
            kept.sym_size(0));
}

}  // namespace dpa
