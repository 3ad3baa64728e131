// out = mish(group_norm(input)) * scale + shift and its backward.
//
// Dimensions: B samples, C channels, L = inner elements a channel, G groups; a group is C / G channels and
// n = C / G * L elements that lie side by side in memory.
//
// grid   one block a group of a sample, B * G in all, striding where that exceeds the grid's limit
// block  256 threads; the statistics are block sums, and everything a group needs stays inside its block
// thread `lanes` neighbouring threads (a power of two up to 32, at most L) walk along one channel, so that a channel's
//        coefficients are loaded once and its sums stay within a warp; neighbouring threads read neighbouring elements
//
// Nothing is saved between forward and backward: the backward must read the input anyway, and takes the statistics from
// it again. The passes over a group after the first hit the cache (a group of 512 channels x 16 is 8 KB in bfloat16).
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/reduce.cuh"
#include "kernels/cuda/group_norm_mish/group_norm_mish.h"
#include "kernels/math/mish.h"

namespace dpa::kernels {
namespace {

constexpr int kThreads = 256;

/// Lanes that share a channel: the largest power of two that is at most 32 and at most L.
int lanes_for(int64_t inner) {
  int lanes = 1;
  while (lanes < kWarpSize && lanes * 2 <= inner) lanes *= 2;
  return lanes;
}

template <class T>
__device__ Accumulate<T> load_or(const void* data, int64_t i, Accumulate<T> otherwise) {
  return data ? widen(static_cast<const T*>(data)[i]) : otherwise;
}

/// One group as its block sees it. `first` is its first channel, `film` that channel's place in a (B, C) tensor.
template <class T>
struct Group {
  using A = Accumulate<T>;
  const T* input;
  int64_t size, offset, first, film;
  A mean, rstd;

  /// Every thread of the block must call; `scratch` has one element a warp.
  __device__ Group(const GroupNormMish& args, int64_t block, A* scratch) {
    const int64_t channels = args.channels / args.groups;
    size = channels * args.inner;
    offset = block * size;
    input = static_cast<const T*>(args.input) + offset;
    first = block % args.groups * channels;
    film = block / args.groups * args.channels + first;
    A sum = 0, squares = 0;
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) sum += widen(input[i]);
    mean = block_sum(sum, scratch) / static_cast<A>(size);
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
      const A centered = widen(input[i]) - mean;
      squares += centered * centered;
    }
    rstd = A(1) / sqrt(block_sum(squares, scratch) / static_cast<A>(size) + static_cast<A>(args.eps));
  }
};

template <class T>
__global__ void forward(GroupNormMish args, int lanes) {
  using A = Accumulate<T>;
  __shared__ A scratch[kThreads / kWarpSize];
  const int64_t channels = args.channels / args.groups;
  const int lane = threadIdx.x % lanes, slot = threadIdx.x / lanes, slots = blockDim.x / lanes;
  for (int64_t block = blockIdx.x; block < args.batch * args.groups; block += gridDim.x) {
    const Group<T> group(args, block, scratch);
    T* out = static_cast<T*>(args.out) + group.offset;
    for (int64_t c = slot; c < channels; c += slots) {
      const A weight = load_or<T>(args.weight, group.first + c, 1) * group.rstd;
      const A bias = load_or<T>(args.bias, group.first + c, 0);
      const A scale = load_or<T>(args.scale, group.film + c, 1), shift = load_or<T>(args.shift, group.film + c, 0);
      for (int64_t i = c * args.inner + lane; i < (c + 1) * args.inner; i += lanes)
        out[i] = narrow<T>(math::mish((widen(group.input[i]) - group.mean) * weight + bias) * scale + shift);
    }
  }
}

/// The gradient of u = normalised * weight + bias at one element.
template <class T>
struct Element {
  using A = Accumulate<T>;
  A normalized, u, grad, grad_u;

  __device__ Element(A x, A grad, const Group<T>& group, A weight, A bias, A scale) : grad(grad) {
    normalized = (x - group.mean) * group.rstd;
    u = normalized * weight + bias;
    grad_u = grad * scale * math::mish_derivative(u);
  }
};

template <class T>
__global__ void backward(GroupNormMishBackward args, int lanes) {
  using A = Accumulate<T>;
  __shared__ A scratch[kThreads / kWarpSize];
  const GroupNormMish& in = args.forward;
  const int64_t channels = in.channels / in.groups, pairs = in.batch * in.channels;
  const int lane = threadIdx.x % lanes, slot = threadIdx.x / lanes, slots = blockDim.x / lanes;
  A* sums = static_cast<A*>(args.sums);
  for (int64_t block = blockIdx.x; block < in.batch * in.groups; block += gridDim.x) {
    const Group<T> group(in, block, scratch);
    const T* grad = static_cast<const T*>(args.grad) + group.offset;
    A sum = 0, dot = 0;  // of the normalised input's gradient, and of it times the normalised input
    for (int64_t base = 0; base < channels; base += slots) {  // every lane stays in the loop: warp_sum needs them all
      const int64_t c = base + slot;
      const bool mine = c < channels;
      const A weight = mine ? load_or<T>(in.weight, group.first + c, 1) : A(0);
      const A bias = mine ? load_or<T>(in.bias, group.first + c, 0) : A(0);
      const A scale = mine ? load_or<T>(in.scale, group.film + c, 1) : A(0);
      A grad_weight = 0, grad_bias = 0, grad_scale = 0, grad_shift = 0;
      for (int64_t i = c * in.inner + lane; mine && i < (c + 1) * in.inner; i += lanes) {
        const Element<T> e(widen(group.input[i]), widen(grad[i]), group, weight, bias, scale);
        grad_weight += e.grad_u * e.normalized;
        grad_bias += e.grad_u;
        grad_scale += e.grad * math::mish(e.u);
        grad_shift += e.grad;
      }
      sum += grad_bias * weight;
      dot += grad_weight * weight;
      grad_weight = warp_sum(grad_weight, lanes), grad_bias = warp_sum(grad_bias, lanes);
      grad_scale = warp_sum(grad_scale, lanes), grad_shift = warp_sum(grad_shift, lanes);
      if (mine && lane == 0) {
        A* to = sums + group.film + c;
        to[0] = grad_weight, to[pairs] = grad_bias, to[2 * pairs] = grad_scale, to[3 * pairs] = grad_shift;
      }
    }
    const A mean = block_sum(sum, scratch) / static_cast<A>(group.size);
    const A slant = block_sum(dot, scratch) / static_cast<A>(group.size);
    if (!args.grad_input) continue;
    T* grad_input = static_cast<T*>(args.grad_input) + group.offset;
    for (int64_t c = slot; c < channels; c += slots) {
      const A weight = load_or<T>(in.weight, group.first + c, 1), bias = load_or<T>(in.bias, group.first + c, 0);
      const A scale = load_or<T>(in.scale, group.film + c, 1);
      for (int64_t i = c * in.inner + lane; i < (c + 1) * in.inner; i += lanes) {
        const Element<T> e(widen(group.input[i]), widen(grad[i]), group, weight, bias, scale);
        grad_input[i] = narrow<T>(group.rstd * (e.grad_u * weight - mean - e.normalized * slant));
      }
    }
  }
}

}  // namespace

cudaError_t group_norm_mish(const GroupNormMish& args, cudaStream_t stream) {
  if (args.channels * args.inner == 0) return cudaSuccess;
  return dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch(forward<T>, grid_for(args.batch * args.groups, 1), kThreads, stream, args, lanes_for(args.inner));
  });
}

cudaError_t group_norm_mish_backward(const GroupNormMishBackward& args, cudaStream_t stream) {
  const auto& in = args.forward;
  return dispatch(in.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch(backward<T>, grid_for(in.batch * in.groups, 1), kThreads, stream, args, lanes_for(in.inner));
  });
}

}  // namespace dpa::kernels
