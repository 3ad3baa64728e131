// CUDA launcher of `dpa::weights_in_order`: copies of convolutions' weights, or of their gradients, in another order and
// dtype, all in one launch.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace dpa::kernels {

constexpr int kWeightsAtOnce = 64;      // of a launch
constexpr int kMostWeightsTaps = 1024;  // of a weight, whose tile fits into shared memory

/// (O, C, taps): contiguous, or channels-last, which is (O, taps, C) in memory; the copy in the other order.
struct WeightInOrder {
  const void* from;
  void* to;
  int first;  // its first row among those of all: an output channel is a row
  int channels, taps;
};

struct WeightsInOrder {
  DType from, to;      // float32 or 16 bits
  bool channels_last;  // of the copies
  int count, rows;
  WeightInOrder weights[kWeightsAtOnce];
};

cudaError_t weights_in_order(const WeightsInOrder& args, cudaStream_t stream);

}  // namespace dpa::kernels
