#include "ops/lltm/lltm.h"

namespace dpa {

void check_lltm(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                const Tensor& old_cell) {
  constexpr const char* op = "lltm";
  check_floating(op, "input", input);
  DPA_CHECK(input.dim() == 2, op, "input must have 2 dimensions (B, I)", "shape ", input.sym_sizes());
  DPA_CHECK(old_h.dim() == 2, op, "old_h must have 2 dimensions (B, S)", "shape ", old_h.sym_sizes());
  const auto batch = input.sym_size(0), features = input.sym_size(1), state = old_h.sym_size(1);
  check_shape(op, "old_h", old_h, {batch, state}, "(B, S)", "input", input);
  check_shape(op, "old_cell", old_cell, {batch, state}, "(B, S)", "input", input);
  check_shape(op, "weights", weights, {3 * state, state + features}, "(3 S, S + I)", "input", input);
  if (bias.dim() == 2)
    check_shape(op, "bias", bias, {1, 3 * state}, "(1, 3 S)", "input", input);
  else
    check_shape(op, "bias", bias, {3 * state}, "(3 S)", "input", input);
}

void check_lltm_backward(const Tensor& grad_h, const Tensor& grad_cell, const Tensor& old_h, const Tensor& gates) {
  constexpr const char* op = "lltm_backward";
  check_same(op, "grad_h", grad_h, "old_h", old_h);
  check_same(op, "grad_cell", grad_cell, "old_h", old_h);
  check_same_device(op, "gates", gates, "old_h", old_h);
  DPA_CHECK(gates.scalar_type() == accumulate_type(old_h.scalar_type()), op, "gates must have the accumulate dtype",
            gates.scalar_type());
  const c10::SymInt sizes[] = {old_h.sym_size(0), 3 * old_h.sym_size(1)};
  DPA_CHECK(gates.sym_sizes().equals(sizes), op, "gates must have shape (B, 3 S)", gates.sym_sizes());
}

}  // namespace dpa
