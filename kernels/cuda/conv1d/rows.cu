// Rows in the layout that the convolutions read, and their sums.
//
// join_rows    a thread an element of the padded rows
// slope        a thread an element
// column_sums  a block takes 16 columns of all rows, two threads a row, eight columns each; then each column's 128
//              partial sums are added in pairs
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/conv1d/conv1d.h"
#include "kernels/cuda/conv1d/launch.cuh"
#include "kernels/math/mish.h"

namespace dpa::kernels::conv1d {
namespace {

constexpr int kSumThreads = 256, kSumRows = kSumThreads / 2, kSumColumns = 16;

template <class T, class S>
__global__ void __launch_bounds__(kSumThreads)
    column_sums_kernel(const T* rows, int64_t count, int64_t channels, int64_t width, S* sums) {
  __shared__ float part[kSumRows][kSumColumns + 1];
  const int64_t first = int64_t{blockIdx.x} * kSumColumns;
  const int lane = threadIdx.x / 2, column = threadIdx.x % 2 * 8;
  float sum[8] = {};
  grid_dependency_sync();
  if (first + column < width) {
#pragma unroll 8
    for (int64_t row = lane; row < count; row += kSumRows) {
      const auto eight = *reinterpret_cast<const Vector<T, 8>*>(rows + row * width + first + column);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] += widen(eight.data[e]);
    }
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) part[lane][column + e] = sum[e];
  for (int half = kSumRows / 2; half > 0; half /= 2) {
    __syncthreads();
    for (int n = threadIdx.x; n < half * kSumColumns; n += kSumThreads)
      part[n / kSumColumns][n % kSumColumns] += part[n / kSumColumns + half][n % kSumColumns];
  }
  // The thread that made the last addition of a column stores it.
  if (threadIdx.x < kSumColumns && first + threadIdx.x < channels)
    sums[first + threadIdx.x] = narrow<S>(part[0][threadIdx.x]);
}

template <class T, bool kMish>
__global__ void join(const T* rows, int64_t channels, const T* more, int64_t more_channels, int64_t count,
                     int64_t width, T* out) {
  grid_dependency_sync();
  for (int64_t e = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; e < count * width;
       e += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = e / width, column = e - row * width, beyond = column - channels;
    const T x = beyond < 0               ? rows[row * channels + column]
                : beyond < more_channels ? more[row * more_channels + beyond]
                                         : narrow<T>(0);
    out[e] = kMish ? narrow<T>(math::mish(widen(x))) : x;
  }
}

template <class T>
__global__ void slope(const T* x, int64_t count, T* grad) {
  grid_dependency_sync();
  const int64_t e = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (e < count) grad[e] = narrow<T>(widen(grad[e]) * math::mish_derivative(widen(x[e])));
}

constexpr int kRowThreads = 256;  // of the kernels of an element a thread

}  // namespace

cudaError_t join_rows(DType dtype, const void* rows, int64_t channels, const void* more, int64_t more_channels,
                      int64_t count, void* out, cudaStream_t stream, bool mish) {
  const int64_t width = padded(channels + more_channels);
  return dispatch_to_32_bits(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_dependent(mish ? join<T, true> : join<T, false>, grid_for(count * width, kRowThreads), kRowThreads,
                            stream, static_cast<const T*>(rows), channels, static_cast<const T*>(more), more_channels,
                            count, width, static_cast<T*>(out));
  });
}

cudaError_t times_mish_slope(DType dtype, const void* x, int64_t count, void* grad, cudaStream_t stream) {
  return dispatch_to_32_bits(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    LaunchConfig config(grid_for(count, kRowThreads), kRowThreads, stream);
    config.dependent(reinterpret_cast<const void*>(slope<T>));
    if (has_branches(stream)) config.priority(-1);
    return config.launch(slope<T>, static_cast<const T*>(x), count, static_cast<T*>(grad));
  });
}

cudaError_t pad_rows(const void* rows, int64_t count, int64_t channels, void* out, cudaStream_t stream, DType dtype) {
  return join_rows(dtype, rows, channels, nullptr, 0, count, out, stream);
}

cudaError_t column_sums(DType dtype, const void* rows, int64_t count, int64_t channels, int64_t width, void* sums,
                        DType sums_dtype, cudaStream_t stream) {
  return dispatch_to_32_bits(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto go = [&](auto* to) {
      using S = std::remove_pointer_t<decltype(to)>;
      return launch_dependent(column_sums_kernel<T, S>, grid_for(channels, kSumColumns), kSumThreads, stream,
                              static_cast<const T*>(rows), count, channels, width, to);
    };
    return sums_dtype == DType::kFloat32 ? go(static_cast<float*>(sums)) : go(static_cast<T*>(sums));
  });
}

}  // namespace dpa::kernels::conv1d
