// CUDA launchers of `dpa::normal_draws` and `dpa::loop_inputs_`.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace dpa::kernels {

/// Numbers a draw, at most: up to here PyTorch gives every number a thread of its own, on every GPU that the library
/// runs on.
constexpr int64_t kMostDrawn = 1 << 16;
/// By how much a draw moves the stream's offset.
constexpr int64_t kDrawOffset = 4;

/// Where a generator's stream stands. A captured generator tells it on the device, when the graph is replayed.
struct PhiloxStream {
  uint64_t seed, offset;
  const int64_t *seed_at, *offset_at;  // both null, or the seed, and what is added to `offset`
};

struct NormalDraws {
  void* out;  // (rows, numel)
  DType dtype;
  int64_t count, rows, numel;  // rows that are drawn, and rows of out
  PhiloxStream stream;
};
cudaError_t normal_draws(const NormalDraws& args, cudaStream_t stream);

/// Memory that is copied in the same launch.
constexpr int kMostCopies = 4;
struct Copies {
  struct Copy {
    const void* from;
    void* to;
    int64_t bytes;
  } of[kMostCopies];
  int count;
};
/// Both in one launch; `args` may have no rows.
cudaError_t loop_inputs(const NormalDraws& args, const Copies& copies, cudaStream_t stream);

}  // namespace dpa::kernels
