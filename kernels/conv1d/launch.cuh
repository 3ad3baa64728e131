// Launching the convolution's kernels: clusters, shared memory beyond 48 KB, the two element types.
#pragma once
#include <map>
#include <utility>

#include "kernels/common/launch.cuh"
#include "kernels/conv1d/ring.cuh"

namespace dpa::kernels::conv1d {

inline int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? count : 1;
}

// Calls `f(TypeTag<T>{})` with the C++ type of a 16-bit `dtype`.
template <class F>
cudaError_t dispatch_half(DType dtype, F&& f) {
  if (dtype == DType::kBFloat16) return f(TypeTag<__nv_bfloat16>{});
  return dtype == DType::kFloat16 ? f(TypeTag<__half>{}) : cudaErrorInvalidValue;
}

struct Launch {
  int64_t blocks;
  int threads, cluster, bytes;  // of a block; blocks of a cluster; shared memory of a block
  cudaStream_t stream;
};

// Remembers for each kernel, device and thread what has been allowed, since asking the driver costs the host a
// microsecond.
inline cudaError_t allow_shared_memory(const void* kernel, int bytes) {
  static thread_local std::map<std::pair<const void*, int>, int> allowed;
  int device = 0;
  if (const auto error = cudaGetDevice(&device)) return error;
  int& most = allowed[{kernel, device}];
  if (bytes <= most) return cudaSuccess;
  const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) most = bytes;
  return error;
}

// A dependent launch (kernels/common/launch.cuh): the kernel's threads call `wait_for_predecessor`.
template <class... Parameters, class... Arguments>
cudaError_t launch_cluster(void (*kernel)(Parameters...), const Launch& launch, const Arguments&... arguments) {
  if (const auto error = allow_shared_memory(reinterpret_cast<const void*>(kernel), launch.bytes)) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = launch.cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
  config.blockDim = dim3(launch.threads);
  config.dynamicSmemBytes = launch.bytes;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = launches_dependent(reinterpret_cast<const void*>(kernel)) ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace dpa::kernels::conv1d
