// Launching the convolution's kernels: clusters, shared memory beyond 48 KB, the two element types.
#pragma once
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/shared_memory.h"
#include "kernels/cuda/conv1d/pipeline.cuh"

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

// The same, or with float.
template <class F>
cudaError_t dispatch_element(DType dtype, F&& f) {
  return dtype == DType::kFloat32 ? f(TypeTag<float>{}) : dispatch_half(dtype, f);
}

struct Launch {
  int64_t blocks;
  int threads, cluster, bytes;  // of a block; blocks of a cluster, 0 without; shared memory of a block
  cudaStream_t stream;
  bool urgent = false;  // where a graph is captured: its blocks go before those of other branches that wait for places
};

// Whether work beside this stream's may be captured with it, at the lowest priority as this stream's own is.
inline bool has_branches(cudaStream_t stream) {
  auto status = cudaStreamCaptureStatusNone;
  int priority = 0;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive &&
         cudaStreamGetPriority(stream, &priority) == cudaSuccess && priority == 0;
}

// A dependent launch (kernels/cuda/common/launch.cuh): the kernel's threads call `grid_dependency_sync`.
template <class... Parameters, class... Arguments>
cudaError_t launch_cluster(void (*kernel)(Parameters...), const Launch& launch, const Arguments&... arguments) {
  if (const auto error = allow_shared_memory(reinterpret_cast<const void*>(kernel), launch.bytes)) return error;
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (launch.cluster > 0) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = launch.cluster;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1, ++count;
  }
  if (launches_dependent(reinterpret_cast<const void*>(kernel))) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1, ++count;
  }
  if (launch.urgent && has_branches(launch.stream)) {
    attributes[count].id = cudaLaunchAttributePriority;
    attributes[count].val.priority = -1, ++count;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
  config.blockDim = dim3(launch.threads);
  config.dynamicSmemBytes = launch.bytes;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace dpa::kernels::conv1d
