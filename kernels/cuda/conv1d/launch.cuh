// Launching the convolution's kernels: clusters, shared memory beyond 48 KB, the two element types.
#pragma once
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/conv1d/pipeline.cuh"

namespace dpa::kernels::conv1d {

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
  LaunchConfig config(dim3(static_cast<unsigned>(launch.blocks)), launch.threads, launch.stream, launch.bytes);
  config.clusters(launch.cluster).dependent(reinterpret_cast<const void*>(kernel));
  if (launch.urgent && has_branches(launch.stream)) config.priority(-1);
  return config.launch(kernel, arguments...);
}

}  // namespace dpa::kernels::conv1d
