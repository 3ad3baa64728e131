#include "ops/common/meta.h"

#include <torch/library.h>

#include "ops/parallel_sweep/parallel_sweep.h"

namespace dpa {
namespace {

std::tuple<Tensor, Tensor> parallel_window_meta(const Tensor& states, const Tensor& table, const Tensor& position,
                                                c10::SymInt window) {
  check_parallel_window(states, table, position, window);
  auto sizes = states.sym_sizes().vec();
  sizes[0] = window;
  return {at::empty_symint(sizes, states.options()), at::empty_symint({window, table.sym_size(1)}, table.options())};
}

void parallel_move_meta(const Tensor& states, const Tensor& position, const Tensor& residual, const Tensor& output,
                        const Tensor& coefficients, const OptionalTensor& noise, const OptionalTensor& known,
                        const OptionalTensor& known_mask, c10::SymInt steps, double clip, double tolerance) {
  check_parallel_move({states, position, residual, output, coefficients, value_or_undefined(noise),
                       value_or_undefined(known), value_or_undefined(known_mask), steps, clip, tolerance});
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("parallel_window", &parallel_window_meta);
  m.impl("parallel_move_", &parallel_move_meta);
}

}  // namespace dpa
