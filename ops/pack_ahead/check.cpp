#include "ops/pack_ahead/pack_ahead.h"

namespace dpa {

void check_pack_ahead(at::TensorList weights, at::IntArrayRef counts, at::ScalarType dtype, c10::SymInt batch,
                      at::SymIntArrayRef lengths) {
  constexpr const char* op = "pack_ahead";
  size_t sum = 0;
  for (const auto count : counts) {
    DPA_CHECK(count >= 1, op, "counts must be at least 1 each", count);
    sum += count;
  }
  DPA_CHECK(sum == weights.size(), op, c10::str("counts must add up to the ", weights.size(), " weights"), sum);
  for (const auto& weight : weights) {
    DPA_CHECK(weight.dim() == 2 || weight.dim() == 3, op, "weights must have 2 or 3 dimensions", "shape ",
              weight.sym_sizes());
    check_floating(op, "weights", weight);
    check_same_device(op, "weights", weight, "the first", weights[0]);
    check_same_type(op, "weights", weight, "the first", weights[0]);
    DPA_CHECK(weight.layout() == at::kStrided, op, "weights must be strided", weight.layout());
  }
  DPA_CHECK(at::isFloatingType(dtype), op, "dtype must be floating", dtype);
  DPA_CHECK(batch >= 0, op, "batch must not be negative", batch);
  DPA_CHECK(lengths.empty() || lengths.size() == counts.size(), op,
            c10::str("lengths must be ", counts.size(), ", one a layer, or none"), lengths.size());
}

}  // namespace dpa
