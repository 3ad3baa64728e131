#include <ATen/ops/empty.h>

#include "ops/normal_draws/normal_draws.h"

namespace dpa {

void check_normal_draws(const Tensor& like, const c10::SymInt& draws, const c10::SymInt& rows) {
  constexpr const char* op = "normal_draws";
  check_floating(op, "like", like);
  DPA_CHECK(draws >= 0, op, "draws must be at least 0", draws);
  DPA_CHECK(rows >= draws, op, "rows must be at least draws", rows, " and ", draws);
}

void check_normal_draws_out(const Tensor& out, const c10::SymInt& draws) {
  constexpr const char* op = "normal_draws";
  check_floating(op, "out", out);
  DPA_CHECK(out.dim() > 0 && out.is_contiguous(), op, "out must be contiguous, with a row a draw", out.sym_sizes());
  DPA_CHECK(draws >= 0 && draws <= out.sym_size(0), op, "draws must be 0 to the rows of out", draws);
}

void check_loop_inputs(at::TensorList kept, at::TensorList given, const Tensor& out, int64_t draws) {
  constexpr const char* op = "loop_inputs_";
  DPA_CHECK(kept.size() == given.size(), op, "given must be as many tensors as kept", given.size());
  for (size_t i = 0; i < kept.size(); i++)
    DPA_CHECK(kept[i].sizes() == given[i].sizes(), op, "given must have the shapes of kept", given[i].sizes());
  DPA_CHECK(out.defined() || draws == 0, op, "out must be given where there are draws", "none");
  DPA_CHECK(!out.defined() || (out.dim() > 0 && out.is_contiguous() && draws >= 0 && draws <= out.size(0)), op,
            "out must be contiguous, with a row a draw or more", out.sizes());
}

void normal_draws_each(Tensor out, int64_t draws, const OptionalGenerator& generator) {
  if (out.numel() == 0) return;  // whatever the number of draws
  for (int64_t d = 0; d < draws; d++) out.select(0, d).normal_(0.0, 1.0, generator);
  if (draws < out.size(0)) out.narrow(0, draws, out.size(0) - draws).zero_();
}

Tensor normal_draws_empty(const Tensor& like, int64_t rows) {
  auto sizes = like.sizes().vec();
  sizes.insert(sizes.begin(), rows);
  return at::empty(sizes, like.options());
}

}  // namespace dpa
