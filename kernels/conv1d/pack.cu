// Weights and rows in the form that the products read.
//
// pack_weight  (d0, d1, taps) -> (taps, d0, d1 padded): a block takes 256 neighbouring columns (j, k) of one row i at a
//              time, reads them side by side and writes each tap's side by side
// pad_rows     a thread an element of the padded rows
#include "kernels/common/launch.cuh"
#include "kernels/conv1d/conv1d.h"
#include "kernels/conv1d/launch.cuh"

namespace dpa::kernels::conv1d {
namespace {

constexpr int kPackThreads = 128;
constexpr int kPackChannels = 256;  // channels j of a block's piece

template <class S, class T>
__global__ void __launch_bounds__(kPackThreads)
    pack(const S* weight, int64_t d0, int64_t d1, int64_t row_length, int taps, T* packed, int64_t pieces) {
  __shared__ T piece[kPackChannels * kMaxTaps];
  for (int64_t block = blockIdx.x; block < d0 * pieces; block += gridDim.x) {
    const int64_t i = block / pieces, first = block % pieces * kPackChannels;
    const int read = static_cast<int>(min(int64_t{kPackChannels}, d1 - first)) * taps;
    const S* from = weight + (i * d1 + first) * taps;
    for (int e = threadIdx.x; e < read; e += kPackThreads) piece[e] = narrow<T>(widen(from[e]));
    __syncthreads();
    const int width = static_cast<int>(min(int64_t{kPackChannels}, row_length - first));
    for (int k = 0; k < taps; ++k) {
      T* to = packed + (k * d0 + i) * row_length + first;
      for (int j = threadIdx.x; j < width; j += kPackThreads)
        to[j] = j * taps < read ? piece[j * taps + k] : narrow<T>(0);
    }
    __syncthreads();
  }
}

__global__ void pad(const uint16_t* rows, int64_t count, int64_t channels, int64_t width, uint16_t* out) {
  for (int64_t e = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; e < count * width;
       e += int64_t{gridDim.x} * blockDim.x)
    out[e] = e % width < channels ? rows[e / width * channels + e % width] : uint16_t{0};
}

}  // namespace

cudaError_t pack_weight(DType source_dtype, DType dtype, const void* weight, int64_t d0, int64_t d1, int taps,
                        void* packed, cudaStream_t stream) {
  if (taps > kMaxTaps) return cudaErrorInvalidValue;
  const int64_t pieces = (padded(d1) + kPackChannels - 1) / kPackChannels;
  return dispatch_half(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto go = [&](const auto* source) {
      using S = std::remove_cv_t<std::remove_pointer_t<decltype(source)>>;
      return launch(pack<S, T>, grid_for(d0 * pieces, 1), kPackThreads, stream, source, d0, d1, padded(d1), taps,
                    static_cast<T*>(packed), pieces);
    };
    return source_dtype == DType::kFloat32 ? go(static_cast<const float*>(weight)) : go(static_cast<const T*>(weight));
  });
}

cudaError_t pad_rows(const void* rows, int64_t count, int64_t channels, void* out, cudaStream_t stream) {
  constexpr int kPadThreads = 256;
  return launch(pad, grid_for(count * padded(channels), kPadThreads), kPadThreads, stream,
                static_cast<const uint16_t*>(rows), count, channels, padded(channels), static_cast<uint16_t*>(out));
}

}  // namespace dpa::kernels::conv1d
