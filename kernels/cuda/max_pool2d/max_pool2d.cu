// out[b, y, x, c] = the maximum of input over a window, and its backward, on channels-last images.
//
// grid   (rows of the image that is written: b and y; pieces of such a row)
// thread one vector of 16 bytes of that image: the forward reads the pixels of its window, the backward the windows
//        that its pixel is in, or of 2 x 2 pixels for windows of 3 x 3 at a stride of 2. Neighbours' reads overlap, and find one another's
//        lines in L1 and L2.
//
// A maximum's place is one byte, its number in the window. Of equal ones the first counts, and NaN is the largest, as
// in PyTorch. The backward adds in the order of the windows, so bits repeat.
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/max_pool2d/max_pool2d.h"

namespace dpa::kernels {
namespace {

constexpr int kThreads = 128;

/// As many bytes as a vector of T has elements.
template <class T>
using Taps = std::conditional_t<sizeof(T) == 4, uint32_t, uint2>;

__device__ __forceinline__ uint32_t word(uint32_t taps, int) { return taps; }
__device__ __forceinline__ uint32_t word(uint2 taps, int i) { return i == 0 ? taps.x : taps.y; }

/// `kKernel`: the side of the window, or 0 where it is args.kernel.
template <class T, int kKernel>
__global__ void __launch_bounds__(kThreads)
    forward(const __grid_constant__ MaxPool2d args, const uint4* input, uint4* out, uint8_t* taps) {
  constexpr int kSize = kVector<T>;
  const int vectors = static_cast<int>(args.channels) / kSize, kernel = kKernel > 0 ? kKernel : args.kernel;
  const int item = blockIdx.y * kThreads + threadIdx.x, width = static_cast<int>(args.width);
  if (item >= static_cast<int>(args.out_width) * vectors) return;
  const int x = item / vectors, vector = item - x * vectors;
  const int sample = blockIdx.x / static_cast<int>(args.out_height);
  const int y = blockIdx.x - sample * static_cast<int>(args.out_height), height = static_cast<int>(args.height);
  const int top = y * args.stride - args.padding, left = x * args.stride - args.padding;
  float best[kSize];
  int at[kSize] = {};
  bool first = true;
#pragma unroll
  for (int i = 0; i < kSize; ++i) best[i] = -INFINITY;
#pragma unroll
  for (int dy = 0; dy < kernel; ++dy) {
    if (top + dy < 0 || top + dy >= height) continue;
    const uint4* const row = input + (int64_t{sample} * height + top + dy) * width * vectors + vector;
#pragma unroll
    for (int dx = 0; dx < kernel; ++dx) {
      if (left + dx < 0 || left + dx >= width) continue;
      float value[kSize];
      unpack<T>(row[(left + dx) * vectors], value);
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        if (first || value[i] > best[i] || isnan(value[i])) best[i] = value[i], at[i] = dy * kernel + dx;
      first = false;
    }
  }
  const int64_t to = int64_t{blockIdx.x} * args.out_width * vectors + item;
  out[to] = pack<T>(best);
  if (taps == nullptr) return;
  uint32_t words[kSize / 4] = {};
#pragma unroll
  for (int i = 0; i < kSize; ++i) words[i / 4] |= static_cast<uint32_t>(at[i]) << 8 * (i % 4);
  if constexpr (kSize == 4)
    reinterpret_cast<uint32_t*>(taps)[to] = words[0];
  else
    reinterpret_cast<uint2*>(taps)[to] = {words[0], words[1]};
}

/// `kStride`: that of the windows, or 0 where it is args.stride.
template <class T, int kStride>
__global__ void __launch_bounds__(kThreads)
    backward(const __grid_constant__ MaxPool2d args, const uint4* grad, const uint8_t* taps, uint4* grad_input) {
  constexpr int kSize = kVector<T>;
  const int vectors = static_cast<int>(args.channels) / kSize, stride = kStride > 0 ? kStride : args.stride;
  const int item = blockIdx.y * kThreads + threadIdx.x;
  if (item >= static_cast<int>(args.width) * vectors) return;
  const int x = item / vectors, vector = item - x * vectors, height = static_cast<int>(args.height);
  const int sample = blockIdx.x / height, y = blockIdx.x - sample * height;
  // The windows [first, last] that hold row y: first * stride - padding + kernel > y, and last * stride - padding <= y.
  const auto first = [&](int at) { return at < args.kernel ? 0 : (at - args.kernel) / stride + 1; };
  const int end_y = min((y + args.padding) / stride + 1, static_cast<int>(args.out_height));
  const int end_x = min((x + args.padding) / stride + 1, static_cast<int>(args.out_width));
  float sum[kSize] = {};
  for (int oy = first(y + args.padding); oy < end_y; ++oy) {
    const int64_t row = (int64_t{sample} * args.out_height + oy) * args.out_width;
    for (int ox = first(x + args.padding); ox < end_x; ++ox) {
      const uint32_t mine = (y + args.padding - oy * stride) * args.kernel + x + args.padding - ox * stride;
      const int64_t from = (row + ox) * vectors + vector;
      const Taps<T> tap = reinterpret_cast<const Taps<T>*>(taps)[from];
      float g[kSize];
      unpack<T>(grad[from], g);
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        if ((word(tap, i / 4) >> 8 * (i % 4) & 255u) == mine) sum[i] += g[i];
    }
  }
  grad_input[int64_t{blockIdx.x} * args.width * vectors + item] = pack<T>(sum);
}

/// Windows of 3 x 3, stride 2 and padding 1. A thread: a vector of 2 x 2 pixels, which lie in the same 2 x 2 windows, so
/// that each of them is read once for four pixels.
template <class T>
__global__ void __launch_bounds__(kThreads)
    backward_3x3(const __grid_constant__ MaxPool2d args, const uint4* grad, const uint8_t* taps, uint4* grad_input) {
  constexpr int kSize = kVector<T>;
  const int vectors = static_cast<int>(args.channels) / kSize, item = blockIdx.y * kThreads + threadIdx.x;
  const int width = static_cast<int>(args.width), height = static_cast<int>(args.height);
  if (item >= (width + 1) / 2 * vectors) return;
  const int x = item / vectors, vector = item - x * vectors, pairs = (height + 1) / 2;
  const int sample = blockIdx.x / pairs, y = blockIdx.x - sample * pairs;  // of the first window
  float g[2][2][kSize] = {};
  Taps<T> tap[2][2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (y + i >= args.out_height || x + j >= args.out_width) continue;
      const int64_t from = ((int64_t{sample} * args.out_height + y + i) * args.out_width + x + j) * vectors + vector;
      unpack<T>(grad[from], g[i][j]);
      tap[i][j] = reinterpret_cast<const Taps<T>*>(taps)[from];
    }
#pragma unroll
  for (int dy = 0; dy < 2; ++dy)
#pragma unroll
    for (int dx = 0; dx < 2; ++dx) {
      if (2 * y + dy >= height || 2 * x + dx >= width) continue;
      float sum[kSize] = {};
#pragma unroll
      for (int i = 0; i <= dy; ++i)
#pragma unroll
        for (int j = 0; j <= dx; ++j) {
          const uint32_t mine = (1 + dy - 2 * i) * 3 + 1 + dx - 2 * j;
#pragma unroll
          for (int k = 0; k < kSize; ++k)
            if ((word(tap[i][j], k / 4) >> 8 * (k % 4) & 255u) == mine) sum[k] += g[i][j][k];
        }
      grad_input[((int64_t{sample} * height + 2 * y + dy) * width + 2 * x + dx) * vectors + vector] = pack<T>(sum);
    }
}

dim3 grid_of_rows(int64_t rows, int64_t items) { return {static_cast<unsigned>(rows), grid_for(items, kThreads)}; }

}  // namespace

bool max_pool2d_fits(const MaxPool2d& args, int element_size) {
  const int64_t vector = 16 / element_size;
  if (args.channels % vector != 0 || args.kernel * args.kernel > 256) return false;
  const int64_t rows = args.batch * std::max(args.height, args.out_height);
  const int64_t row = std::max(args.width, args.out_width) * args.channels / vector;
  return fits_32_bits(rows) && row <= int64_t{65535} * kThreads;
}

cudaError_t max_pool2d(const MaxPool2d& args, const void* input, void* out, uint8_t* taps, cudaStream_t stream) {
  return dispatch_to_32_bits(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const dim3 grid = grid_of_rows(args.batch * args.out_height, args.out_width * args.channels / kVector<T>);
    return launch(args.kernel == 3 ? forward<T, 3> : forward<T, 0>, grid, kThreads, stream, args, input, out, taps);
  });
}

cudaError_t max_pool2d_backward(const MaxPool2d& args, const void* grad, const uint8_t* taps, void* grad_input,
                                cudaStream_t stream) {
  return dispatch_to_32_bits(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t vectors = args.channels / kVector<T>;
    if (args.kernel == 3 && args.stride == 2 && args.padding == 1) {
      const dim3 grid = grid_of_rows(args.batch * ((args.height + 1) / 2), (args.width + 1) / 2 * vectors);
      return launch(backward_3x3<T>, grid, kThreads, stream, args, grad, taps, grad_input);
    }
    const dim3 grid = grid_of_rows(args.batch * args.height, args.width * vectors);
    return launch(args.stride == 2 ? backward<T, 2> : backward<T, 0>, grid, kThreads, stream, args, grad, taps,
                  grad_input);
  });
}

}  // namespace dpa::kernels
