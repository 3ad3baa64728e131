// Which of the cell's two paths serves a size: a pure function, so host code that knows no CUDA can ask and test it.
#pragma once
#include <cstdint>

namespace dpa::kernels {

/// Rows of X that the one-kernel forward keeps in shared memory: four samples of this many float64 are 32 KB.
constexpr int64_t kLltmMaxInputs = 1024;

/// Whether the one-kernel paths are the faster ones: few multiply-adds, and rows of X that fit into shared memory.
inline bool lltm_is_small(int64_t batch, int64_t features, int64_t state) {
  constexpr int64_t kMaxMultiplyAdds = int64_t{1} << 23;  // a library's GEMM is as fast from there on
  const int64_t inputs = state + features;
  return inputs <= kLltmMaxInputs && batch * inputs <= kMaxMultiplyAdds / (3 * state + 1);
}

}  // namespace dpa::kernels
