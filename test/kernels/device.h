// What tests and benchmarks on a GPU share: the check of CUDA's answers, captured graphs, times by events.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                          \
  do {                                                                                       \
    cudaError_t error_ = (call);                                                             \
    if (error_ != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::fflush(stdout);                                                                   \
      std::exit(1);                                                                          \
    }                                                                                        \
  } while (0)

namespace dpa::test {

/// What `f` enqueues to the stream, as a graph.
template <class F>
cudaGraphExec_t captured(cudaStream_t stream, F&& f) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  f();
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  CHECK(cudaGraphDestroy(graph));
  return exec;
}

/// Median microseconds of what `f` enqueues, after three times that do not count; `before` runs ahead of each, untimed.
template <class F, class Before>
double median_us(cudaStream_t stream, int repeats, F&& f, Before&& before) {
  constexpr int kWarmUp = 3;
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < repeats + kWarmUp; i++) {
    before();
    CHECK(cudaEventRecord(begin, stream));
    f();
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= kWarmUp) times.push_back(ms * 1000);
  }
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}
template <class F>
double median_us(cudaStream_t stream, int repeats, F&& f) {
  return median_us(stream, repeats, f, [] {});
}

}  // namespace dpa::test
