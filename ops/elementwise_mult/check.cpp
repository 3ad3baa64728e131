#include <ATen/MemoryOverlap.h>

#include "ops/elementwise_mult/elementwise_mult.h"

namespace dpa {

void check_elementwise_mult_out(const Tensor& a, const Tensor& b, const Tensor& out) {
  constexpr const char* op = "elementwise_mult";
  check_pair(op, "a", a, "b", b);
  check_same(op, "out", out, "a", a);
  DPA_CHECK(at::has_internal_overlap(out) != at::MemOverlap::Yes, op,
            "out must have one place in memory for each element", "strides ", out.sym_strides());
  for (const auto& [name, input] : {std::pair("a", a), std::pair("b", b)})
    DPA_CHECK(at::get_overlap_status(out, input) != at::MemOverlapStatus::Partial, op,
              c10::str("out must be ", name, " itself or share no memory with it"), "a partial overlap");
}

}  // namespace dpa
