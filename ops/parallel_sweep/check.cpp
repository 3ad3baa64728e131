#include "kernels/plans/parallel_sweep/window.h"
#include "ops/parallel_sweep/parallel_sweep.h"

namespace dpa {
namespace {

void check_position(const char* op, const Tensor& position, const Tensor& states) {
  check_same_device(op, "position", position, "states", states);
  DPA_CHECK(position.scalar_type() == at::kLong && position.sym_numel() == 1, op, "position must be one int64",
            position.scalar_type(), " ", position.sym_sizes());
}

void check_states(const char* op, const Tensor& states, const c10::SymInt& window) {
  DPA_CHECK(states.scalar_type() == at::kFloat, op, "states must be float32", states.scalar_type());
  DPA_CHECK(states.dim() > 0 && states.is_contiguous(), op, "states must be contiguous, with a row a step",
            states.sym_sizes());
  DPA_CHECK(window >= 1 && window <= kernels::kLargestWindow, op,
            c10::str("the window must be 1 to ", kernels::kLargestWindow), window);
}

}  // namespace

void check_parallel_window(const Tensor& states, const Tensor& table, const Tensor& position,
                           const c10::SymInt& window) {
  constexpr const char* op = "parallel_window";
  check_states(op, states, window);
  check_same_device(op, "table", table, "states", states);
  check_same_type(op, "table", table, "states", states);
  DPA_CHECK(table.dim() == 2 && table.is_contiguous(), op, "table must be contiguous (N, R)", table.sym_sizes());
  check_position(op, position, states);
  DPA_CHECK(states.sym_size(0) >= window && table.sym_size(0) >= window, op,
            c10::str("states and table must have a window of rows (", window, ") or more"), states.sym_size(0), " and ",
            table.sym_size(0));
}

void check_parallel_move(const MoveArguments& in) {
  constexpr const char* op = "parallel_move_";
  const Tensor& output = in.output;
  DPA_CHECK(output.dim() == 4, op, "output must be (W, B, T, A)", output.sym_sizes());
  DPA_CHECK(in.states.dim() > 0 && in.steps >= 0 && in.steps <= in.states.sym_size(0), op,
            "steps must be 0 to the rows of states", in.steps);
  const auto window = output.sym_size(0), rows = in.steps + 2 * window;
  check_states(op, in.states, window);
  const auto b = output.sym_size(1), t = output.sym_size(2), a = output.sym_size(3);
  const c10::SymInt states[] = {rows + 1, b, t, a}, noise[] = {rows, b, t, a}, one[] = {b, t, a}, table[] = {rows, 6};
  check_shape(op, "states", in.states, states, "(steps + 2 W + 1, B, T, A)", "output", output);
  check_position(op, in.position, in.states);
  check_same_device(op, "residual", in.residual, "states", in.states);
  DPA_CHECK(in.residual.scalar_type() == at::kFloat && in.residual.sym_numel() == 1, op, "residual must be one float32",
            in.residual.scalar_type(), " ", in.residual.sym_sizes());
  check_shape(op, "coefficients", in.coefficients, table, "(steps + 2 W, 6)", "output", output);
  if (in.noise.defined()) check_shape(op, "noise", in.noise, noise, "(steps + 2 W, B, T, A)", "output", output);
  DPA_CHECK(in.known.defined() == in.known_mask.defined(), op, "known must be given where known_mask is",
            in.known.defined() ? "known alone" : "known_mask alone");
  if (in.known.defined()) {
    check_shape(op, "known", in.known, one, "(B, T, A)", "output", output);
    check_same_device(op, "known_mask", in.known_mask, "states", in.states);
    DPA_CHECK(in.known_mask.scalar_type() == at::kBool && in.known_mask.sym_sizes().equals(one), op,
              "known_mask must be bool (B, T, A)", in.known_mask.scalar_type(), " ", in.known_mask.sym_sizes());
  }
  DPA_CHECK(in.clip >= 0, op, "clip must be at least 0 (infinity turns it off)", in.clip);
  DPA_CHECK(in.tolerance >= 0, op, "tolerance must be at least 0", in.tolerance);
}

}  // namespace dpa
