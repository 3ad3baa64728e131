// CUDA launchers of `dpa::parallel_window` and `dpa::parallel_move_`: what a sweep of parallel sampling does before and
// after the network.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/plans/parallel_sweep/window.h"

namespace dpa::kernels {

/// Rows [*position, *position + window) of two matrices, whose widths are given.
struct ParallelWindow {
  const float *states, *table;
  const int64_t* position;
  int64_t window, state_width, table_width;
  int64_t last;  // the largest position that both matrices have room for
  float *samples, *rows;
};
cudaError_t parallel_window(const ParallelWindow& args, cudaStream_t stream);

struct ParallelMove {
  float* states;                  // (rows + 1, batch, inner)
  int64_t* position;              // where the window begins
  float* residual;                // the largest move that was accepted
  const float* output;            // (window, batch, inner), the network's
  const float* coefficients;      // (rows, 6), of dpa::scheduler_step
  const float* noise;             // (rows, batch, inner), or null
  const float* condition_data;    // (batch, inner): inpainted values, or null
  const uint8_t* condition_mask;  // (batch, inner): where `condition_data` holds
  float* squares;                 // memory for a sum a row of the window and 32 elements of a sample, begun or whole
  int64_t steps, window, batch, inner;
  float clip, tolerance;
};
/// Elements of a sample whose moves are summed together, and how many such parts it has.
constexpr int kMovedTogether = 32;
__host__ __device__ constexpr int64_t moved_parts(int64_t inner) {
  return (inner + kMovedTogether - 1) / kMovedTogether;
}
cudaError_t parallel_move(const ParallelMove& args, cudaStream_t stream);

}  // namespace dpa::kernels
