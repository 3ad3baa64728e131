// Where the threads of a team stand, what they hold, and their sums (channels_last.cu, large_groups.cu).
#pragma once
#include <type_traits>

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/two_halves.cuh"
#include "kernels/cuda/group_norm_mish/common.cuh"

namespace dpa::kernels::channels_last {

/// kSize neighbouring values, 2 to 16 bytes, as they are stored. Sixteen-bit values stay packed: a thread that holds a
/// group as floats would need twice the registers.
template <class T, int kSize>
struct alignas(kSize * sizeof(T)) Vector {
  static constexpr int kBytes = kSize * sizeof(T);
  std::conditional_t<kBytes == 2, uint16_t, uint32_t> words[kBytes == 2 ? 1 : kBytes / 4];

  __device__ __forceinline__ float operator[](int i) const {
    const uint32_t word = words[i * static_cast<int>(sizeof(T)) / 4];
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    } else {
      return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> (i % 2 * 16))));
    }
  }

  /// Values `2 * i` and `2 * i + 1`. Those of 16 bits are assembled from halves: as one word (pack_pair) it is other
  /// machine code.
  __device__ __forceinline__ void set_pair(int i, float low, float high) {
    if constexpr (sizeof(T) == 4) {
      words[2 * i] = __float_as_uint(low), words[2 * i + 1] = __float_as_uint(high);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      words[i] = __bfloat16_as_ushort(pair.x) | uint32_t{__bfloat16_as_ushort(pair.y)} << 16;
    } else {
      const __half2 pair = __floats2half2_rn(low, high);
      words[i] = __half_as_ushort(pair.x) | uint32_t{__half_as_ushort(pair.y)} << 16;
    }
  }

  /// From here on the compiler unpacks the words again, instead of keeping what it unpacked before.
  __device__ __forceinline__ void keep_packed() {
#pragma unroll
    for (auto& word : words) word = ptx::held(word);
  }
};

template <class T>
constexpr int kWhole = 16 / sizeof(T);  // values of 16 bytes

/// A thread's channels as arithmetic wants them, from an address aligned as its vectors are; `otherwise` without one.
template <class T, int kCount>
__device__ __forceinline__ void load_channels(float (&to)[kCount], const T* from, float otherwise) {
  constexpr int kSize = kCount < kWhole<T> ? kCount : kWhole<T>;
#pragma unroll
  for (int i = 0; i < kCount; i += kSize) {
    Vector<T, kSize> vector;
    if (from) vector = *reinterpret_cast<const Vector<T, kSize>*>(from + i);
#pragma unroll
    for (int j = 0; j < kSize; ++j) to[i + j] = from ? vector[j] : otherwise;
  }
}

template <int kChannels, class T>
__device__ __forceinline__ void store_channels(T* to, const float* from) {
  if constexpr (kChannels == 1) {
    *to = narrow<T>(*from);
  } else {
    Vector<T, kChannels> vector;
#pragma unroll
    for (int i = 0; i < kChannels; i += 2) vector.set_pair(i / 2, from[i], from[i + 1]);
    *reinterpret_cast<Vector<T, kChannels>*>(to) = vector;
  }
}

/// Float32 values as two float16 numbers each, in planes `plane` elements apart.
template <int kChannels>
__device__ __forceinline__ void store_halves(void* to, int64_t at, int64_t plane, const float* from) {
  __half* const high = static_cast<__half*>(to) + at;
  if constexpr (kChannels == 1) {
    uint32_t highs, lows;
    split_pair(*from, 0, math::kActivationScale, highs, lows);
    *reinterpret_cast<uint16_t*>(high) = static_cast<uint16_t>(highs);
    *reinterpret_cast<uint16_t*>(high + plane) = static_cast<uint16_t>(lows);
  } else {
    Vector<__half, kChannels> highs, lows;
#pragma unroll
    for (int i = 0; i < kChannels; i += 2)
      split_pair(from[i], from[i + 1], math::kActivationScale, highs.words[i / 2], lows.words[i / 2]);
    *reinterpret_cast<Vector<__half, kChannels>*>(high) = highs;
    *reinterpret_cast<Vector<__half, kChannels>*>(high + plane) = lows;
  }
}

/// A pointer moved on, or null.
template <class T>
__device__ __forceinline__ const T* at_or_null(const void* data, int64_t offset) {
  return data ? static_cast<const T*>(data) + offset : nullptr;
}

/// The logarithm of a power of two.
__device__ __forceinline__ int log2_of(int power) { return __ffs(power) - 1; }

/// Where a thread stands. All of a plan's sizes are powers of two, and a sample's elements count in an int.
struct ThreadCoord {
  int sample, group;      // of its team, among those that the block works on at a time
  int thread;             // in its team
  int column, row, step;  // of the thread's first vector; rows between its vectors
  bool in_row;            // whether there is such a column
  int channel;            // its first channel

  __device__ ThreadCoord(const NormPlan& plan, int group_set, int owned) {
    const int team = threadIdx.x >> log2_of(plan.threads);
    sample = team >> log2_of(plan.groups), group = team & (plan.groups - 1);
    thread = threadIdx.x & (plan.threads - 1);
    column = thread & (plan.width - 1), row = thread >> log2_of(plan.width);
    step = plan.threads >> log2_of(plan.width);
    in_row = column * owned < plan.channels;
    channel = (group_set * plan.groups + group) * plan.channels + (in_row ? column * owned : 0);
  }
};

/// Sums over a team. Every thread of the block must call. `scratch` has one element a warp.
__device__ __forceinline__ float team_sum(float x, int threads, float* scratch) {
  if (threads > kWarpSize) return block_sum(x, scratch);
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    if (offset < threads) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/// A thread's vectors of a group, of C channels each, one for each of its rows below `rows`; zeros beyond.
template <class T, int C, int V>
struct Held {
  Vector<T, C> vectors[V];

  __device__ __forceinline__ void load(const T* from, const ThreadCoord& coord, int rows, int stride) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int row = coord.row + k * coord.step;
      vectors[k] = {};
      if (row < rows) vectors[k] = *reinterpret_cast<const Vector<T, C>*>(from + row * stride);
    }
  }
  __device__ __forceinline__ void keep_packed() {
#pragma unroll
    for (auto& vector : vectors) vector.keep_packed();
  }
};

/// Of a group. `normalized` of 16-bit elements is one multiplication and addition, without subtracting the mean first:
/// what that loses where the mean is far from zero is 2^-12 of an element's own rounding, or less.
struct Statistics {
  float mean, rstd;

  __device__ __forceinline__ Statistics(float mean, float rstd) : mean(mean), rstd(rstd) {}
  /// Every thread of the block must call; `scratch` has one element a warp.
  template <class T, int C, int V>
  __device__ __forceinline__ Statistics(Held<T, C, V>& x, const ThreadCoord& coord, int rows, float over,
                                        const GroupNormMish& args, float* scratch) {
    float sum = 0, squares = 0;
#pragma unroll
    for (int k = 0; k < V; ++k)
#pragma unroll
      for (int i = 0; i < C; ++i) sum += x.vectors[k][i];
    mean = team_sum(sum, args.plan.threads, scratch) * over;
    x.keep_packed();
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (coord.row + k * coord.step >= rows) continue;
#pragma unroll
      for (int i = 0; i < C; ++i) {
        const float centered = x.vectors[k][i] - mean;
        squares += centered * centered;
      }
    }
    x.keep_packed();
    rstd = rsqrt(team_sum(squares, args.plan.threads, scratch) * over + static_cast<float>(args.eps));
  }

  template <class T>
  __device__ __forceinline__ float normalized(float x) const {
    return sizeof(T) == 4 ? (x - mean) * rstd : fmaf(x, rstd, -mean * rstd);
  }
};

/// Sums `values` over the threads of a warp that hold the same channels of the same group of the same sample. The whole
/// warp must call; each of those threads holds the sums.
template <int kCount>
__device__ __forceinline__ void sum_over_rows(float (&values)[kCount], const NormPlan& plan) {
  const int within = plan.threads < kWarpSize ? plan.threads : kWarpSize;
#pragma unroll 1
  for (int offset = plan.width; offset < within; offset *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] += __shfl_xor_sync(0xffffffffu, values[i], offset);
  }
}

/// The same over the block, in a fixed order, with `store(i, group, channel, sum)` for value i of the
/// channel vector that begins with `channel` of the group. Every thread of the block must call. `scratch` has kCount
/// elements a thread.
template <int kChannels, int kCount, class Store>
__device__ __forceinline__ void sum_over_block(float (&values)[kCount], const ThreadCoord& coord, const NormPlan& plan,
                                               float* scratch, Store&& store) {
  sum_over_rows(values, plan);
  const int keys = plan.groups * plan.width;
  const int within = plan.threads < kWarpSize ? plan.threads : kWarpSize;
  const int stride = within > plan.width ? within : plan.width;  // from one writer of a key to the next
  const int key = coord.group * plan.width + coord.column;
  const int writers_of_team = plan.threads >> log2_of(stride);
  const int writer = coord.sample * writers_of_team + (coord.thread >> log2_of(stride));
  const int writers = plan.samples() * writers_of_team;
  if ((coord.thread & (stride - 1)) < plan.width) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scratch[(i * writers + writer) * keys + key] = values[i];
  }
  __syncthreads();
  for (int item = threadIdx.x; item < kCount * keys; item += blockDim.x) {
    const int i = item >> log2_of(keys), of = item & (keys - 1), channel = (of & (plan.width - 1)) * kChannels;
    const float* from = scratch + i * writers * keys + of;
    float sum = 0;
    for (int w = 0; w < writers; ++w) sum += from[w * keys];
    if (channel < plan.channels) store(i, of >> log2_of(plan.width), channel, sum);
  }
  __syncthreads();
}

}  // namespace dpa::kernels::channels_last
