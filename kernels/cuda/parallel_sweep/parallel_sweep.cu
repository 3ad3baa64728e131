// What a sweep of parallel sampling does around the network (python/dpa/sampling/parallel.py has the method). With p
// the window's beginning, W its length, f_i the steps of the table, A_i = r3 - r4 r0 / r1 their slopes:
//
//   window   samples[j] = states[p + j], rows[j] = table[p + j], j < W
//   move     y[j] = f_i(x[j]) + A_i (y[j - 1] - x[j]), i = p + j, j < 2 W, x[j] = states[p + j]; behind the window,
//            j >= W, x = 0 and the output is the one that keeps the window's last x0;
//            states[p + j + 1] <- y[j]; p <- p + as many steps as moved by no more than the tolerance, the first always
//
// window: a thread four neighbouring numbers where a row divides by four, else one.
// move: a block 32 elements of a sample, an element a lane. Warp w evaluates rows w, w + 8, ... into shared memory; the
//   first warp carries the moves on from row to row; then warp w stores its rows and sums their squared moves.
// accept: one block, a thread a row of the window, adds these sums in order and moves p on.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/reduce.cuh"
#include "kernels/cuda/parallel_sweep/parallel_sweep.h"
#include "kernels/math/diffusion_step.h"

namespace dpa::kernels {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
static_assert(kMovedTogether == kWarpSize);

// Kept to what there is, whatever the caller's number says.
__device__ __forceinline__ int64_t position_of(const int64_t* position, int64_t last) {
  return max(int64_t{0}, min(*position, last));
}

template <class T>  // float, or float4
__global__ void __launch_bounds__(kThreads) window_kernel(const ParallelWindow a, int64_t states, int64_t rows) {
  const int64_t e = blockIdx.x * int64_t{kThreads} + threadIdx.x, begin = position_of(a.position, a.last);
  if (e < rows) {
    reinterpret_cast<T*>(a.rows)[e] = reinterpret_cast<const T*>(a.table)[begin * (rows / a.window) + e];
  } else if (e < rows + states) {
    reinterpret_cast<T*>(a.samples)[e - rows] =
        reinterpret_cast<const T*>(a.states)[begin * (states / a.window) + e - rows];
  }
}

// The step f_i of an element, and its slope.
struct Step {
  math::SchedulerStep<float> formula;
  float inverse, slope;
  bool silent;  // the output says nothing of x0
  __device__ __forceinline__ Step(const ParallelMove& a, int64_t row)
      : formula(a.coefficients, row, a.clip, a.noise != nullptr), silent(formula.r1 == 0.0f) {
    inverse = silent ? 0.0f : 1.0f / formula.r1;
    slope = formula.r3 - formula.r4 * formula.r0 * inverse;
  }
};

__global__ void __launch_bounds__(kThreads) move_kernel(const ParallelMove a) {
  extern __shared__ float shared[];
  const int window = static_cast<int>(a.window), lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t begin = position_of(a.position, a.steps), width = a.batch * a.inner;
  float* gained = shared;                           // (2 window, 32): f_i(x), then y
  float* before = gained + 2 * window * kWarpSize;  // (window, 32): x
  float* slopes = before + window * kWarpSize;      // (2 window)
  const int64_t parts = moved_parts(a.inner), element = blockIdx.x % parts * kWarpSize + lane;
  const bool valid = element < a.inner;
  const int64_t at = blockIdx.x / parts * a.inner + (valid ? element : 0);
  const bool inpainted = a.condition_mask && a.condition_mask[at];
  for (int j = warp; j < 2 * window; j += kWarps) {
    const int64_t row = begin + j;
    const Step step(a, row);
    const int from = min(j, window - 1);
    const float x = a.states[(begin + from) * width + at];
    float output = a.output[from * width + at];
    if (j >= window && !step.silent) {
      const float* last = a.coefficients + (begin + window - 1) * math::SchedulerStep<float>::kColumns;
      output = (last[0] * x + last[1] * output) * step.inverse;
    }
    const float noise = a.noise ? a.noise[row * width + at] : 0.0f;
    gained[j * kWarpSize + lane] = step.formula.step(output, j < window ? x : 0.0f, noise);
    if (j < window) before[j * kWarpSize + lane] = x;
    if (lane == 0) slopes[j] = step.slope;
  }
  __syncthreads();
  if (warp == 0) {
    float y = 0.0f;
    for (int j = 0; j < 2 * window; j++) {
      const float x = j < window ? before[j * kWarpSize + lane] : 0.0f;
      y = gained[j * kWarpSize + lane] + (j == 0 ? 0.0f : slopes[j] * (y - x));
      if (inpainted) y = a.condition_data[at];
      gained[j * kWarpSize + lane] = y;
    }
  }
  __syncthreads();
  for (int j = warp; j < 2 * window; j += kWarps) {
    float* state = a.states + (begin + j + 1) * width + at;
    const float y = gained[j * kWarpSize + lane];
    const float move = valid && j < window ? y - *state : 0.0f;
    if (valid) *state = y;
    const float sum = warp_sum(move * move);
    if (lane == 0 && j < window) a.squares[int64_t{blockIdx.x} * window + j] = sum;
  }
}

__global__ void __launch_bounds__(kLargestWindow) accept_kernel(const ParallelMove a) {
  __shared__ float moved[kLargestWindow];  // the largest of all samples
  const int window = static_cast<int>(a.window), row = static_cast<int>(threadIdx.x);
  const int64_t parts = moved_parts(a.inner), begin = position_of(a.position, a.steps);
  const float mean = 1.0f / static_cast<float>(a.inner);
  if (row < window) {
    float most = 0.0f;
    for (int64_t b = 0; b < a.batch; b++) {
      float sum = 0.0f;
      for (int64_t i = 0; i < parts; i++) sum += a.squares[(b * parts + i) * window + row];
      const float move = sqrtf(sum * mean);
      most = move > most || move != move ? move : most;  // a NaN stays one: no comparison removes it
    }
    moved[row] = most;
  }
  __syncthreads();
  if (row > 0) return;
  float accepted = 0.0f;
  int count = 1;  // the first is exact, however far it moved
  while (count < window && moved[count] <= a.tolerance) accepted = fmaxf(accepted, moved[count++]);
  *a.position = min(begin + count, a.steps);
  *a.residual = fmaxf(*a.residual, accepted);
}

}  // namespace

cudaError_t parallel_window(const ParallelWindow& args, cudaStream_t stream) {
  const bool fours = args.state_width % 4 == 0 && args.table_width % 4 == 0;
  const int64_t each = fours ? 4 : 1, states = args.window * args.state_width / each,
                rows = args.window * args.table_width / each;
  const dim3 blocks(grid_for(states + rows, kThreads));
  return fours ? launch(window_kernel<float4>, blocks, kThreads, stream, args, states, rows)
               : launch(window_kernel<float>, blocks, kThreads, stream, args, states, rows);
}

cudaError_t parallel_move(const ParallelMove& args, cudaStream_t stream) {
  const size_t bytes = static_cast<size_t>(args.window) * (3 * kWarpSize + 2) * sizeof(float);
  const dim3 blocks(static_cast<unsigned>(args.batch * moved_parts(args.inner)));
  if (const auto error = LaunchConfig(blocks, kThreads, stream, bytes).launch(move_kernel, args)) return error;
  return launch(accept_kernel, dim3(1), kLargestWindow, stream, args);
}

}  // namespace dpa::kernels
