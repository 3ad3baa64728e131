#include <torch/library.h>

#include "ops/normal_draws/normal_draws.h"

namespace dpa {
namespace {

Tensor normal_draws_cpu(const Tensor& like, int64_t draws, int64_t rows, const OptionalGenerator& generator) {
  check_normal_draws(like, draws, rows);
  auto out = normal_draws_empty(like, rows);
  normal_draws_each(out, draws, generator);
  return out;
}

void normal_draws_out_cpu(int64_t draws, const OptionalGenerator& generator, const Tensor& out) {
  check_normal_draws_out(out, draws);
  normal_draws_each(out, draws, generator);
}

void loop_inputs_cpu(at::TensorList kept, at::TensorList given, const OptionalTensor& out_, int64_t draws,
                     const OptionalGenerator& generator) {
  const Tensor out = value_or_undefined(out_);
  check_loop_inputs(kept, given, out, draws);
  for (size_t i = 0; i < kept.size(); i++) kept[i].copy_(given[i]);
  if (out.defined()) normal_draws_each(out, draws, generator);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("normal_draws", &normal_draws_cpu);
  m.impl("normal_draws.out", &normal_draws_out_cpu);
  m.impl("loop_inputs_", &loop_inputs_cpu);
}

}  // namespace dpa
