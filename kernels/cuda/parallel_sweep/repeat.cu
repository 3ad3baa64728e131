// A conditional node: the device decides whether there is a next time, and asks nobody.
//
//   while (*position < end) { body -> again }
//
// again: one thread counts, and says whether to go on.
#include "kernels/cuda/parallel_sweep/repeat.h"

#if CUDART_VERSION < 13000  // these names had forms without edges, which programmatic launches make
#define cudaGraphAddNode cudaGraphAddNode_v2
#define cudaStreamGetCaptureInfo cudaStreamGetCaptureInfo_v3
#define cudaStreamUpdateCaptureDependencies cudaStreamUpdateCaptureDependencies_v2
#endif

namespace {

__global__ void again(cudaGraphConditionalHandle loop, const int64_t* position, int64_t end, float* count) {
  ++*count;
  cudaGraphSetConditional(loop, *position < end);
}

cudaError_t fill(cudaGraph_t inside, cudaGraph_t body, cudaGraphConditionalHandle loop, const int64_t* position,
                 int64_t end, float* count) {
  cudaGraphNode_t once = nullptr, last = nullptr;
  if (const auto error = cudaGraphAddChildGraphNode(&once, inside, nullptr, 0, body)) return error;
  void* arguments[] = {&loop, &position, &end, &count};
  cudaKernelNodeParams kernel = {};
  kernel.func = reinterpret_cast<void*>(&again);
  kernel.gridDim = kernel.blockDim = dim3(1), kernel.kernelParams = arguments;
  return cudaGraphAddKernelNode(&last, inside, &once, 1, &kernel);
}

}  // namespace

cudaError_t dpa_capture_repeat(cudaStream_t stream, cudaGraph_t body, const int64_t* position, int64_t end,
                               float* count) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* before = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t number = 0;
  if (const auto error = cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, &before, &edges, &number))
    return error;
  if (status != cudaStreamCaptureStatusActive) return cudaErrorIllegalState;
  cudaGraphNodeParams loop = {};
  loop.type = cudaGraphNodeTypeConditional;
  loop.conditional.type = cudaGraphCondTypeWhile, loop.conditional.size = 1;
  auto& handle = loop.conditional.handle;
  if (const auto error = cudaGraphConditionalHandleCreate(&handle, graph, 1, cudaGraphCondAssignDefault)) return error;
  cudaGraphNode_t repeated = nullptr;
  if (const auto error = cudaGraphAddNode(&repeated, graph, before, edges, number, &loop)) return error;
  if (const auto error = fill(loop.conditional.phGraph_out[0], body, handle, position, end, count)) return error;
  return cudaStreamUpdateCaptureDependencies(stream, &repeated, nullptr, 1, cudaStreamSetCaptureDependencies);
}
