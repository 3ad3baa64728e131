// fprop and dgrad of float32 to its own accuracy, whose operands are pairs of float16 numbers: the kernel of
// convolution_kernel.cuh, and the pairs, eight neighbours of the padded rows or of packed weights a thread.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/two_halves.cuh"
#include "kernels/cuda/conv1d/convolution_kernel.cuh"
#include "kernels/cuda/conv1d/launch_conv.cuh"

namespace dpa::kernels::conv1d {
namespace {

constexpr int kSplitThreads = 256;

__global__ void __launch_bounds__(kSplitThreads)
    split_kernel(const float* rows, int64_t count, int channels, int width, float scale, uint4* highs, uint4* lows) {
  grid_dependency_sync();
  const int64_t eights = count * width / 8, i = int64_t{blockIdx.x} * kSplitThreads + threadIdx.x;
  if (i >= eights) return;
  const int64_t row = i * 8 / width;
  const int first = static_cast<int>(i * 8 - row * width);
  const float* const from = rows + row * channels + first;
  float x[8];
  if (channels % 4 == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = first + half * 4 < channels;
      const float4 four = there ? reinterpret_cast<const float4*>(from)[half] : make_float4(0, 0, 0, 0);
      x[half * 4] = four.x, x[half * 4 + 1] = four.y, x[half * 4 + 2] = four.z, x[half * 4 + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = first + e < channels ? from[e] : 0.0f;
  }
  uint4 high, low;
  split_pair(x[0], x[1], scale, high.x, low.x), split_pair(x[2], x[3], scale, high.y, low.y);
  split_pair(x[4], x[5], scale, high.z, low.z), split_pair(x[6], x[7], scale, high.w, low.w);
  highs[i] = high, lows[i] = low;
}

cudaError_t split_to(const void* rows, int64_t count, int64_t channels, int64_t width, float scale, void* high,
                     void* low, cudaStream_t stream) {
  return launch_dependent(split_kernel, grid_for(count * width / 8, kSplitThreads), kSplitThreads, stream,
                          static_cast<const float*>(rows), count, static_cast<int>(channels), static_cast<int>(width),
                          scale, static_cast<uint4*>(high), static_cast<uint4*>(low));
}

}  // namespace

cudaError_t split_rows(const void* rows, int64_t count, int64_t channels, void* out, cudaStream_t stream) {
  __half* const low = static_cast<__half*>(out) + count * padded(channels);
  return split_to(rows, count, channels, padded(channels), math::kActivationScale, out, low, stream);
}

cudaError_t split_weights(const void* packed, int64_t count, int64_t width, void* high, void* low,
                          cudaStream_t stream) {
  return split_to(packed, count, width, width, math::kWeightScale, high, low, stream);
}

cudaError_t launch_halves(bool dgrad, int columns, const TensorMaps& maps, const ConvArgs& args, cudaStream_t stream) {
  return dispatch_value<64, 128>(columns, [&](auto n) {
    return dgrad ? launch_conv<TwoHalves, n.value, kAlongN>(maps, args, stream)
                 : launch_conv<TwoHalves, n.value, kAlongK>(maps, args, stream);
  });
}

}  // namespace dpa::kernels::conv1d
