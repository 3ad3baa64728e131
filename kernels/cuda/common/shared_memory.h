// Shared memory beyond 48 KB, which a kernel must be allowed before it is launched with it.
#pragma once
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

namespace dpa::kernels {

/// Lets `kernel` be launched with `bytes` of dynamic shared memory on the current device. The driver keeps one limit
/// for all threads, so it only ever rises: another thread may be about to launch the kernel with more. Each thread
/// remembers what it has seen, since the lock and the driver cost the host a microsecond.
inline cudaError_t allow_shared_memory(const void* kernel, int bytes) {
  using Limits = std::map<std::pair<const void*, int>, int>;
  static std::mutex mutex;
  static Limits limits;
  static thread_local Limits seen;
  int device = 0;
  if (const auto error = cudaGetDevice(&device)) return error;
  int& mine = seen[{kernel, device}];
  if (bytes <= mine) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(mutex);
  int& limit = limits[{kernel, device}];
  if (bytes > limit) {
    const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    limit = bytes;
  }
  mine = limit;
  return cudaSuccess;
}

}  // namespace dpa::kernels
