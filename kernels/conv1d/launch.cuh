// Launching the convolution's kernels: clusters, shared memory beyond 48 KB, the two element types.
#pragma once
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

template <class... Parameters, class... Arguments>
cudaError_t launch_cluster(void (*kernel)(Parameters...), const Launch& launch, const Arguments&... arguments) {
  if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.bytes))
    return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = launch.cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
  config.blockDim = dim3(launch.threads);
  config.dynamicSmemBytes = launch.bytes;
  config.stream = launch.stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace dpa::kernels::conv1d
