// The one place where kernels are launched: empty work and the error check. Grid limits are in plans/grid.h.
//
// Programmatic dependent launch (PDL): in a chain of short kernels most of the time lies between the end of one and the
// start of the next. A kernel launched by `launch_dependent` may start while the one ahead of it in the stream still
// runs, as soon as all of that one's blocks have called `trigger_dependent_launch` or ended. Every thread of it must
// call `grid_dependency_sync` before it touches memory, for reading or writing; after that call everything that
// precedes the kernel in the stream is complete and visible. Hopper and later; elsewhere both calls do nothing.
#pragma once
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kernels/plans/grid.h"

namespace dpa::kernels {

/// Every thread of a kernel that `launch_dependent` launches calls it before its first access to global memory.
__device__ __forceinline__ void grid_dependency_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

/// Lets the next kernel's blocks start. It orders no memory: they wait for the end of this kernel.
__device__ __forceinline__ void trigger_dependent_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/// Whether the code that runs for `kernel` on the current device synchronises with the grid dependency, which code
/// compiled for an older architecture does not, on a newer device either. One answer serves a device: all kernels are
/// compiled for the same ones. DPA_DEPENDENT_LAUNCH=0 in the environment turns dependent launches off.
inline bool launches_dependent(const void* kernel) {
  static const bool wanted = [] {
    const char* value = std::getenv("DPA_DEPENDENT_LAUNCH");
    return value == nullptr || std::string_view(value) != "0";
  }();
  enum : int8_t { kUnknown, kNo, kYes };
  static std::array<std::atomic<int8_t>, 64> known{};
  int device = 0;
  if (!wanted || cudaGetDevice(&device) != cudaSuccess || device >= static_cast<int>(known.size())) return false;
  if (known[device] == kUnknown) {
    cudaFuncAttributes attributes = {};
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return false;  // the launch will report it
    known[device] = attributes.ptxVersion >= 90 ? kYes : kNo;
  }
  return known[device] == kYes;
}

/// Launches `kernel`; a grid of no blocks is no launch and no error. Returns the launch's own error.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, cudaStream_t stream,
                   Arguments&&... arguments) {
  if (blocks.x == 0 || blocks.y == 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

/// The same for a kernel whose threads call `grid_dependency_sync`.
template <class... Parameters, class... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, cudaStream_t stream,
                             Arguments&&... arguments) {
  if (blocks.x == 0 || blocks.y == 0) return cudaSuccess;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = launches_dependent(reinterpret_cast<const void*>(kernel)) ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace dpa::kernels
