// CUDA launcher of `dpa::values_differ`.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace dpa::kernels {

/// Views of one dimension, and where their bytes are kept. A kernel's parameters have 4 KB.
constexpr int kMostViews = 126;
struct Views {
  struct View {
    const void* data;
    int64_t stride, place;  // bytes from element to element, and bytes kept before this view's
    int32_t count, size;    // elements, and bytes of one
  } of[kMostViews];
  const void* kept;
  bool* differ;  // set where a byte is another; `values_differ` does not clear it
  int count;
};
cudaError_t values_differ(const Views& args, cudaStream_t stream);

}  // namespace dpa::kernels
