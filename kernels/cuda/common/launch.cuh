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

#include "kernels/cuda/common/device.h"
#include "kernels/cuda/common/shared_memory.h"
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

/// A launch: grid, block, and its attributes.
class LaunchConfig {
 public:
  LaunchConfig(dim3 blocks, unsigned threads, cudaStream_t stream, size_t shared_bytes = 0) {
    config_.gridDim = blocks, config_.blockDim = dim3(threads), config_.stream = stream;
    config_.dynamicSmemBytes = shared_bytes, config_.attrs = attributes_;
  }
  LaunchConfig(const LaunchConfig&) = delete;

  /// All blocks are there at once, or the launch is an error.
  LaunchConfig& cooperative(bool wanted = true) {
    if (wanted) add(cudaLaunchAttributeCooperative).cooperative = 1;
    return *this;
  }
  /// Clusters of so many blocks; 0: none.
  LaunchConfig& clusters(int blocks) {
    if (blocks > 0) add(cudaLaunchAttributeClusterDimension).clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    return *this;
  }
  /// A dependent launch of a kernel whose threads call `grid_dependency_sync`.
  LaunchConfig& dependent(const void* kernel) {
    if (launches_dependent(kernel))
      add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
    return *this;
  }
  LaunchConfig& priority(int priority) {
    add(cudaLaunchAttributePriority).priority = priority;
    return *this;
  }

  /// A grid of no blocks is no launch and no error. Returns the launch's own error.
  template <class... Parameters, class... Arguments>
  cudaError_t launch(void (*kernel)(Parameters...), Arguments&&... arguments) const {
    if (config_.gridDim.x == 0 || config_.gridDim.y == 0) return cudaSuccess;
    if (const auto error = allow(reinterpret_cast<const void*>(kernel))) return error;
    return cudaLaunchKernelEx(&config_, kernel, static_cast<Parameters>(arguments)...);
  }
  /// How many of its clusters fit the current device at once.
  template <class... Parameters>
  int active_clusters(void (*kernel)(Parameters...)) const {
    int count = 0;
    if (allow(reinterpret_cast<const void*>(kernel)) == cudaSuccess &&
        cudaOccupancyMaxActiveClusters(&count, kernel, &config_) == cudaSuccess)
      return count;
    cudaGetLastError();
    return 0;
  }

 private:
  cudaLaunchConfig_t config_ = {};
  cudaLaunchAttribute attributes_[3] = {};

  cudaLaunchAttributeValue& add(cudaLaunchAttributeID id) {
    auto& attribute = attributes_[config_.numAttrs++];
    attribute.id = id;
    return attribute.val;
  }
  cudaError_t allow(const void* kernel) const {
    const int bytes = static_cast<int>(config_.dynamicSmemBytes);
    return bytes > 0 ? allow_shared_memory(kernel, bytes) : cudaSuccess;
  }
};

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, cudaStream_t stream,
                   Arguments&&... arguments) {
  return LaunchConfig(blocks, threads, stream).launch(kernel, arguments...);
}

/// The same for a kernel whose threads call `grid_dependency_sync`.
template <class... Parameters, class... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, cudaStream_t stream,
                             Arguments&&... arguments) {
  if (blocks.x == 0 || blocks.y == 0) return cudaSuccess;
  return LaunchConfig(blocks, threads, stream)
      .dependent(reinterpret_cast<const void*>(kernel))
      .launch(kernel, arguments...);
}

}  // namespace dpa::kernels
