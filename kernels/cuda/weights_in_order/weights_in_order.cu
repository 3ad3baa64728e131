// to[o, tap, c] = from[o, c, tap], or the reverse, of many weights.
//
// grid   one block an output channel of a weight, those of all weights in a row
// block  a transposition of (C, taps) through shared memory, as many channels at a time as fit
// thread neighbouring elements, of what is read and of what is written
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/weights_in_order/weights_in_order.h"

namespace dpa::kernels {
namespace {

constexpr int kThreads = 256, kTile = 4608;  // 512 channels of 9 taps
static_assert(kMostWeightsTaps <= kTile, "a channel's taps lie in one tile");

template <class From, class To>
__global__ void __launch_bounds__(kThreads) reorder(const __grid_constant__ WeightsInOrder args) {
  __shared__ float tile[kTile];  // (channels, taps)
  int which = 0;
  for (int i = 1; i < args.count; ++i) which += args.weights[i].first <= static_cast<int>(blockIdx.x);
  const WeightInOrder& weight = args.weights[which];
  const int taps = weight.taps, channels = weight.channels;
  const int64_t row = int64_t{blockIdx.x - weight.first} * channels * taps;
  const From* const from = static_cast<const From*>(weight.from) + row;
  To* const to = static_cast<To*>(weight.to) + row;
  const int most = kTile / taps;
  for (int begin = 0; begin < channels; begin += most) {
    const int some = min(most, channels - begin), items = some * taps;
    if (args.channels_last) {
      for (int i = threadIdx.x; i < items; i += kThreads) tile[i] = widen(from[begin * taps + i]);
      __syncthreads();
      for (int i = threadIdx.x; i < items; i += kThreads) {
        const int tap = i / some, channel = i - tap * some;
        to[tap * channels + begin + channel] = narrow<To>(tile[channel * taps + tap]);
      }
    } else {
      for (int i = threadIdx.x; i < items; i += kThreads) {
        const int tap = i / some, channel = i - tap * some;
        tile[channel * taps + tap] = widen(from[tap * channels + begin + channel]);
      }
      __syncthreads();
      for (int i = threadIdx.x; i < items; i += kThreads) to[begin * taps + i] = narrow<To>(tile[i]);
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t weights_in_order(const WeightsInOrder& args, cudaStream_t stream) {
  return dispatch_to_32_bits(args.from, [&](auto from) {
    return dispatch_to_32_bits(args.to, [&](auto to) {
      return launch(reorder<typename decltype(from)::type, typename decltype(to)::type>,
                    dim3(static_cast<unsigned>(args.rows)), kThreads, stream, args);
    });
  });
}

}  // namespace dpa::kernels
