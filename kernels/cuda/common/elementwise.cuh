// Element-wise kernels of two inputs, for a functor `f(a, b)` in the type of the arithmetic.
//
// contiguous: a thread handles `Unroll` vectors, a block's width apart, and loads all of them before it computes. One
//   of 16 bytes reaches the memory's speed. The tail of fewer elements than a vector, and data that does not start at a
//   multiple of 16 bytes, go one element at a time. In a chain of kernels a short one is mostly launch: it is a
//   dependent launch, and triggers the next one once its own loads are in flight.
// strided: one thread an element, striding over the grid; the element's place follows from its number by division.
#pragma once
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/elementwise.h"
#include "kernels/cuda/common/launch.cuh"

namespace dpa::kernels {

constexpr int kElementwiseThreads = 256;
constexpr int kVectorBytes = 16;

template <class T, int Width, int Unroll, class F>
__global__ void contiguous(T* out, const T* a, const T* b, int64_t vectors, F f) {
  using V = Vector<T, Width>;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x * Unroll + threadIdx.x;
  V x[Unroll], y[Unroll];
  grid_dependency_sync();
#pragma unroll
  for (int u = 0; u < Unroll; ++u) {
    const int64_t i = first + int64_t{u} * blockDim.x;
    if (i < vectors) x[u] = reinterpret_cast<const V*>(a)[i], y[u] = reinterpret_cast<const V*>(b)[i];
  }
  trigger_dependent_launch();
#pragma unroll
  for (int u = 0; u < Unroll; ++u) {
    const int64_t i = first + int64_t{u} * blockDim.x;
    if (i >= vectors) break;
    V z;
#pragma unroll
    for (int w = 0; w < Width; ++w) z.data[w] = narrow<T>(f(widen(x[u].data[w]), widen(y[u].data[w])));
    reinterpret_cast<V*>(out)[i] = z;
  }
}

template <class T, class Index, class F>
__global__ void strided(Elementwise args, F f) {
  const Index count = static_cast<Index>(args.count), step = static_cast<Index>(int64_t{gridDim.x} * blockDim.x);
  for (Index i = static_cast<Index>(int64_t{blockIdx.x} * blockDim.x + threadIdx.x); i < count; i += step) {
    int64_t place[3] = {};
    Index rest = i;
    for (int d = 0; d < args.dims; ++d) {
      const Index size = static_cast<Index>(args.sizes[d]), at = rest % size;
      rest /= size;
#pragma unroll
      for (int t = 0; t < 3; ++t) place[t] += at * args.strides[t][d];
    }
    const T x = *reinterpret_cast<const T*>(static_cast<const char*>(args.a) + place[1]);
    const T y = *reinterpret_cast<const T*>(static_cast<const char*>(args.b) + place[2]);
    *reinterpret_cast<T*>(static_cast<char*>(args.out) + place[0]) = narrow<T>(f(widen(x), widen(y)));
    if (count - i <= step) break;  // the next index might not fit into its type
  }
}

template <class T, int Width, int Unroll, class F>
cudaError_t launch_contiguous(const Elementwise& args, int64_t first, int64_t count, cudaStream_t stream, F f) {
  const int64_t vectors = count / Width;
  return launch_dependent(contiguous<T, Width, Unroll, F>, grid_for(vectors, kElementwiseThreads * Unroll),
                          kElementwiseThreads, stream, static_cast<T*>(args.out) + first,
                          static_cast<const T*>(args.a) + first, static_cast<const T*>(args.b) + first, vectors, f);
}

inline bool starts_at_vector(const Elementwise& args) {
  const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  return (address(args.out) | address(args.a) | address(args.b)) % kVectorBytes == 0;
}

/// `make(accumulate type's zero)` gives the functor for a dtype.
template <class Make>
cudaError_t launch_elementwise(const Elementwise& args, cudaStream_t stream, const Make& make) {
  return dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = kVectorBytes / sizeof(T);
    const auto f = make(Accumulate<T>{});
    if (!args.contiguous) {
      const auto kernel =
          args.count < (int64_t{1} << 31) ? strided<T, uint32_t, decltype(f)> : strided<T, int64_t, decltype(f)>;
      return launch(kernel, grid_for(args.count, kElementwiseThreads), kElementwiseThreads, stream, args, f);
    }
    if (!starts_at_vector(args)) return launch_contiguous<T, 1, 2>(args, 0, args.count, stream, f);
    const int64_t whole = args.count / kWidth * kWidth;
    const cudaError_t error = launch_contiguous<T, kWidth, 1>(args, 0, whole, stream, f);
    if (error != cudaSuccess || whole == args.count) return error;
    return launch_contiguous<T, 1, 1>(args, whole, args.count - whole, stream, f);
  });
}

}  // namespace dpa::kernels
