#include "ops/common/meta.h"

#include <torch/library.h>

#include "ops/normal_draws/normal_draws.h"

namespace dpa {
namespace {

Tensor normal_draws_meta(const Tensor& like, c10::SymInt draws, c10::SymInt rows, const OptionalGenerator&) {
  check_normal_draws(like, draws, rows);
  auto sizes = like.sym_sizes().vec();
  sizes.insert(sizes.begin(), rows);
  return at::empty_symint(sizes, like.options());
}

void normal_draws_out_meta(c10::SymInt draws, const OptionalGenerator&, const Tensor& out) {
  check_normal_draws_out(out, draws);
}

void loop_inputs_meta(at::TensorList, at::TensorList, const OptionalTensor&, c10::SymInt, const OptionalGenerator&) {}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("normal_draws", &normal_draws_meta);
  m.impl("normal_draws.out", &normal_draws_out_meta);
  m.impl("loop_inputs_", &loop_inputs_meta);
}

}  // namespace dpa
