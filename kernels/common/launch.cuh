// The one place where kernels are launched: empty work, grid limits and the error check.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace dpa::kernels {

/// Blocks for `items` pieces of work, `per_block` a block. Kernels stride over what does not fit into one grid.
inline unsigned grid_for(int64_t items, int64_t per_block) {
  constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
  return static_cast<unsigned>(std::min((items + per_block - 1) / per_block, kMaxBlocks));
}

/// Launches `kernel`; a grid of no blocks is no launch and no error. Returns the launch's own error.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, cudaStream_t stream,
                   Arguments&&... arguments) {
  if (blocks == 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace dpa::kernels
