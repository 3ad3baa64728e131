// out = mish(group_norm(input)) * scale + shift + residual and its backward, on channels-last tensors.
//
// Dimensions: B samples, C channels, L rows a sample, G groups; a group of a sample is L rows of C / G neighbouring
// channels, C elements apart.
//
// team    the threads that own one group of one sample (plan.h): `width` of them side by side along a row, so that a
//         thread's vector (16 bytes, or less: plan.h) always belongs to the same channels; the rows are divided. A
//         team is a warp, a part of one, or a block, and holds its group in registers: each element is read once.
// block   several teams; teams of a warp that is shared by several own neighbouring groups
// grid    a slice of the samples a block, as many as the processor holds at once. The backward adds the gradients of
//         weight and bias up in registers from sample to sample, and writes one partial sum a slice.
//
// The statistics are taken in two passes over registers, so a mean far from zero costs no digits.
#include <type_traits>

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/group_norm_mish/common.cuh"

namespace dpa::kernels::channels_last {
namespace {

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

template <class T, class P, int kChannels, int V>
__global__ void __launch_bounds__(kMaxTeam, 2) forward_kernel(GroupNormMish args) {
  __shared__ float scratch[kMaxTeam / kWarpSize];
  const int channels = args.shape.channels, inner = args.shape.inner, samples = args.plan.samples();
  const int64_t batch = args.shape.batch, step = int64_t{gridDim.y} * samples;
  const float over = 1.0f / static_cast<float>(inner * args.plan.channels);
  const ThreadCoord coord(args.plan, blockIdx.x, kChannels);
  grid_dependency_sync();
  float weight[kChannels], bias[kChannels];
  load_channels(weight, at_or_null<P>(args.weight, coord.channel), 1.0f);
  load_channels(bias, at_or_null<P>(args.bias, coord.channel), 0.0f);
  const auto rows_of = [&](int64_t sample) { return sample < batch && coord.in_row ? inner : 0; };
  const auto fetch = [&](Held<T, kChannels, V>& to, int64_t sample) {
    const T* from = static_cast<const T*>(args.input) + sample * (inner * channels) + coord.channel;
    to.load(from, coord, rows_of(sample), channels);
  };
  int64_t sample = int64_t{blockIdx.y} * samples + coord.sample;
  Held<T, kChannels, V> x;
  fetch(x, sample);
  for (int64_t base = int64_t{blockIdx.y} * samples; base < batch; base += step, sample += step) {
    Held<T, kChannels, V> next;  // on its way while this one is worked on
    fetch(next, sample + step);
    const int rows = rows_of(sample);
    const int64_t film = rows > 0 ? sample : 0, first = film * (inner * channels) + coord.channel;
    float scale[kChannels], shift[kChannels];
    load_channels(scale, at_or_null<T>(args.scale, film * args.scale_stride + coord.channel), 1.0f);
    load_channels(shift, at_or_null<T>(args.shift, film * args.shift_stride + coord.channel), 0.0f);
    const Statistics s(x, coord, rows, over, args, scratch);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int row = coord.row + k * coord.step;
      if (row >= rows) break;
      const int64_t at = first + row * channels;
      float out[kChannels];
#pragma unroll
      for (int i = 0; i < kChannels; ++i)
        out[i] = Mish(s.normalized<T>(x.vectors[k][i]) * weight[i] + bias[i]).value * scale[i] + shift[i];
      if (args.residual) {
        float residual[kChannels];
        load_channels(residual, static_cast<const T*>(args.residual) + at, 0.0f);
#pragma unroll
        for (int i = 0; i < kChannels; ++i) out[i] += residual[i];
      }
      store_channels<kChannels>(static_cast<T*>(args.out) + at, out);
    }
    x = next;
  }
}

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

/// With `kFilm` there are scale and shift, or gradients of them are wanted; with `kSums` those of the input's gradient.
template <class T, class P, int kChannels, int V, bool kFilm, bool kSums>
__global__ void __launch_bounds__(kMaxTeam, 2) backward_kernel(GroupNormMishBackward args) {
  constexpr int kGradients = kSums ? 3 : 2;  // of weight, of bias, and the sums
  __shared__ float scratch[kMaxTeam / kWarpSize];
  extern __shared__ float sums[];  // kGradients * kChannels of each of `plan.sum_places()`
  trigger_dependent_launch();
  bool waits = args.early;
  if (!waits) grid_dependency_sync();
  const GroupNormMish& in = args.forward;
  const NormPlan& plan = in.plan;
  const int channels = in.shape.channels, inner = in.shape.inner, samples = plan.samples();
  const float over = 1.0f / static_cast<float>(inner * plan.channels);
  const ThreadCoord coord(plan, blockIdx.x, kChannels);
  float weight[kChannels], bias[kChannels], parameters[kGradients * kChannels] = {};
  load_channels(weight, at_or_null<P>(in.weight, coord.channel), 1.0f);
  load_channels(bias, at_or_null<P>(in.bias, coord.channel), 0.0f);
  for (int64_t base = int64_t{blockIdx.y} * samples; base < in.shape.batch; base += int64_t{gridDim.y} * samples) {
    const bool here = base + coord.sample < in.shape.batch;
    const int64_t sample = here ? base + coord.sample : 0, first = sample * (inner * channels) + coord.channel;
    const int rows = here && coord.in_row ? inner : 0;
    Held<T, kChannels, V> x, grad;
    x.load(static_cast<const T*>(in.input) + first, coord, rows, channels);
    if (!waits) grad.load(static_cast<const T*>(args.grad) + first, coord, rows, channels);
    float scale[kChannels], films[2 * kChannels] = {};  // the latter: gradients of scale, then of shift
    if constexpr (kFilm) load_channels(scale, at_or_null<T>(in.scale, sample * in.scale_stride + coord.channel), 1.0f);
    const Statistics s(x, coord, rows, over, in, scratch);
    if (waits) {
      grid_dependency_sync();
      grad.load(static_cast<const T*>(args.grad) + first, coord, rows, channels);
      waits = false;
    }
    float normalized_grad[V][kChannels], sum = 0,
                                         dot = 0;  // the normalised input's gradient; its sums with 1 and with it
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (coord.row + k * coord.step >= rows) break;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        const float normalized = s.normalized<T>(x.vectors[k][i]), g = grad.vectors[k][i];
        const Mish mish(normalized * weight[i] + bias[i]);
        float grad_u = g * mish.slope;
        if constexpr (kFilm) {
          grad_u *= scale[i];
          films[i] += g * mish.value;
          films[kChannels + i] += g;
        }
        parameters[i] += grad_u * normalized;
        parameters[kChannels + i] += grad_u;
        normalized_grad[k][i] = grad_u * weight[i];
        sum += normalized_grad[k][i];
        dot += normalized_grad[k][i] * normalized;
      }
    }
    x.keep_packed();
    const float mean = -team_sum(sum, plan.threads, scratch) * over * s.rstd;
    const float slant = -team_sum(dot, plan.threads, scratch) * over * s.rstd;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int row = coord.row + k * coord.step;
      if (row >= rows || !args.grad_input) break;
      float out[kChannels];
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        out[i] = s.normalized<T>(x.vectors[k][i]) * slant + (normalized_grad[k][i] * s.rstd + mean);
        if constexpr (kSums) parameters[2 * kChannels + i] += out[i];
      }
      store_channels<kChannels>(static_cast<T*>(args.grad_input) + first + row * channels, out);
    }
    if constexpr (kFilm) {
      T *grad_scale = static_cast<T*>(args.grad_scale), *grad_shift = static_cast<T*>(args.grad_shift);
      if (plan.threads > kWarpSize) {
        sum_over_block<kChannels>(films, coord, plan, sums, [&](int i, int, int channel, float value) {
          T* to = i < kChannels ? grad_scale : grad_shift;
          const int64_t at = base * channels + int64_t{blockIdx.x} * plan.channels + channel + i % kChannels;
          if (to) to[at] = narrow<T>(value);
        });
      } else {
        sum_over_rows(films, plan);
        if (rows == 0 || coord.row != 0) continue;
        const int64_t pair = sample * channels + coord.channel;
        if (grad_scale) store_channels<kChannels>(grad_scale + pair, films);
        if (grad_shift) store_channels<kChannels>(grad_shift + pair, films + kChannels);
      }
    }
  }
  if (!args.partials) return;
  float* partials = args.partials + int64_t{blockIdx.y} * channels;
  sum_over_block<kChannels>(parameters, coord, plan, sums, [&](int i, int group, int channel, float value) {
    const int64_t gradient = i / kChannels * int64_t{gridDim.y} * channels;
    partials[gradient + (blockIdx.x * plan.groups + group) * plan.channels + channel + i % kChannels] = value;
  });
}

/// Calls `f` with a thread's channels and vectors as constants. The smaller vectors have few forms.
template <class T, class F>
cudaError_t dispatch_vectors(const NormPlan& plan, F&& f) {
  return dispatch_value<8, 4, 2, 1>(plan.owned, [&](auto owned) {
    const auto with = [&](auto vectors) { return f(owned, vectors); };
    if constexpr (owned.value > kWhole<T>)
      return cudaErrorInvalidValue;
    else if constexpr (owned.value == kWhole<T>)
      return dispatch_value<1, 2, 4>(plan.vectors, with);
    else
      return dispatch_value<kMaxVectors, (owned.value > 1 ? kMaxSmallVectors : kMaxSingleChannels)>(plan.vectors, with);
  });
}

}  // namespace

cudaError_t forward(const GroupNormMish& args, cudaStream_t stream) {
  const dim3 blocks(args.shape.groups / args.plan.groups, slices(args.shape, args.plan));
  return dispatch_types(args, [&](auto tag, auto parameter) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(parameter)::type;
    return dispatch_vectors<T>(args.plan, [&](auto owned, auto vectors) {
      return launch_dependent(forward_kernel<T, P, owned.value, vectors.value>, blocks, args.plan.block, stream, args);
    });
  });
}

cudaError_t backward(const GroupNormMishBackward& args, cudaStream_t stream) {
  const GroupNormMish& in = args.forward;
  const dim3 blocks(in.shape.groups / in.plan.groups, slices(in.shape, in.plan));
  const bool film = in.scale || args.grad_scale || args.grad_shift;
  return dispatch_types(in, [&](auto tag, auto parameter) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(parameter)::type;
    return dispatch_vectors<T>(in.plan, [&](auto owned, auto vectors) {
      constexpr int kChannels = owned.value, V = vectors.value;
      const auto with = [&](auto film, auto sums) {
        const auto kernel = backward_kernel<T, P, kChannels, V, film.value, sums.value>;
        const int count = (sums.value ? 3 : 2) * kChannels;
        LaunchConfig config(blocks, in.plan.block, stream, count * in.plan.sum_places() * sizeof(float));
        return config.dependent(reinterpret_cast<const void*>(kernel)).launch(kernel, args);
      };
      constexpr std::true_type kYes;
      constexpr std::false_type kNo;
      if constexpr (kChannels < kWhole<T>) {
        return args.sums ? with(kYes, kYes) : with(kYes, kNo);
      } else {
        if (args.sums) return film ? with(kYes, kYes) : with(kNo, kYes);
        return film ? with(kYes, kNo) : with(kNo, kNo);
      }
    });
  });
}

}  // namespace dpa::kernels::channels_last
