// `dpa::parallel_window` and `dpa::parallel_move_`: what a sweep of parallel sampling does before and after the
// network, in a launch each. dpa.parallel.Sweeps has the method, and does the same in PyTorch's ops elsewhere than on
// CUDA. Inference: nothing is differentiable.
#pragma once
#include "ops/common/check.h"

namespace dpa {

/// `states` (N, ...) and `table` (N', R): the window's rows of both, at `position`, one int64 on the device.
void check_parallel_window(const Tensor& states, const Tensor& table, const Tensor& position,
                           const c10::SymInt& window);

struct MoveArguments {
  Tensor states, position, residual;  // (rows + 1, B, T, A), one int64, one float: written
  Tensor output;                      // (W, B, T, A), rows = steps + 2 W
  Tensor coefficients;                // (rows, 6)
  Tensor noise, known, known_mask;    // (rows, B, T, A), (B, T, A), bool (B, T, A), or undefined
  c10::SymInt steps;
  double clip, tolerance;
};
void check_parallel_move(const MoveArguments& in);

}  // namespace dpa
