// How Python records a loop in the capture of a CUDA graph: parallel sampling's sweeps, of which nobody knows how many.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

/// In the capture of `stream`, what follows is a copy of `body`, run again and again while `*position < end`, once at the
/// least; each time `*count` grows by one. The three numbers' memory is the device's. `body` may have kernels, and copies
/// and memsets on the device, and must bring `*position` on, since nothing else ends it.
extern "C" cudaError_t dpa_capture_repeat(cudaStream_t stream, cudaGraph_t body, const int64_t* position, int64_t end,
                                          float* count);
