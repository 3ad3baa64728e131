// out = mish(group_norm(input)) * scale + shift + residual and its backward, on channels-last tensors.
//
// Dimensions: B samples, C channels, L rows a sample, G groups; a group of a sample is L rows of C / G neighbouring
// channels, C elements apart.
//
// team    the threads that own one group of one sample (plan.h): `width` of them side by side along a row, so that a
//         thread's vector of 16 bytes always belongs to the same channels; the rows are shared out over the team. A
//         team is a warp, a part of one, or a block, and holds its group in registers: each element is read once.
// block   several teams; teams of a warp that is shared by several own neighbouring groups
// grid    forward: one team for each group of each sample. backward: a slice of the samples a block, which adds the
//         gradients of weight and bias up in registers from sample to sample and writes one partial sum a slice.
//
// The statistics are taken twice over registers, mean first, so a mean far from zero costs no digits.
#include <algorithm>
#include <type_traits>

#include "kernels/common/ptx.cuh"
#include "kernels/group_norm_mish/common.cuh"

namespace dpa::kernels::channels_last {
namespace {

/// 16 bytes of neighbouring channels, as they are stored. Sixteen-bit values stay packed: a thread that holds a group
/// as floats would need twice the registers.
template <class T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  uint32_t words[4];

  __device__ __forceinline__ Accumulate<T> operator[](int i) const {
    if constexpr (sizeof(T) == 8) {
      return __hiloint2double(words[2 * i + 1], words[2 * i]);
    } else if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    } else {
      return __half2float(__ushort_as_half(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16))));
    }
  }

  /// Values `2 * i` and `2 * i + 1`.
  __device__ __forceinline__ void set_pair(int i, Accumulate<T> low, Accumulate<T> high) {
    if constexpr (sizeof(T) == 8) {
      words[4 * i] = __double2loint(low), words[4 * i + 1] = __double2hiint(low);
      words[4 * i + 2] = __double2loint(high), words[4 * i + 3] = __double2hiint(high);
    } else if constexpr (sizeof(T) == 4) {
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
    for (uint32_t& word : words) word = ptx::held(word);
  }
};

/// `count` values as arithmetic wants them, from an address aligned to 16 bytes; `otherwise` without one.
template <int kCount, class T>
__device__ __forceinline__ void load_channels(Accumulate<T> (&to)[kCount], const T* from, Accumulate<T> otherwise) {
  static_assert(kCount % Vector<T>::kSize == 0, "a thread's channels are whole vectors");
#pragma unroll
  for (int i = 0; i < kCount; i += Vector<T>::kSize) {
    Vector<T> vector;
    if (from) vector = *reinterpret_cast<const Vector<T>*>(from + i);
#pragma unroll
    for (int j = 0; j < Vector<T>::kSize; ++j) to[i + j] = from ? vector[j] : otherwise;
  }
}

template <class T, int kCount>
__device__ __forceinline__ void store_channels(T* to, const Accumulate<T>* from) {
#pragma unroll
  for (int i = 0; i < kCount; i += Vector<T>::kSize) {
    Vector<T> vector;
#pragma unroll
    for (int j = 0; j < Vector<T>::kSize; j += 2) vector.set_pair(j / 2, from[i + j], from[i + j + 1]);
    *reinterpret_cast<Vector<T>*>(to + i) = vector;
  }
}

/// A pointer moved on, or null.
template <class T>
__device__ __forceinline__ const T* at_or_null(const void* data, int64_t offset) {
  return data ? static_cast<const T*>(data) + offset : nullptr;
}

/// The logarithm of a power of two.
__device__ __forceinline__ int log2_of(int power) { return __ffs(power) - 1; }

/// Where a thread stands. All of a plan's sizes are powers of two.
struct Place {
  int sample, group;      // of its team, among those that the block works on at a time
  int thread;             // in its team
  int column, row, step;  // of the thread's first vector; rows between its vectors
  bool in_row;            // whether there is such a column
  int64_t channel;        // its first channel

  __device__ Place(const NormPlan& plan, int64_t group_set, int vector_size) {
    const int team = threadIdx.x >> log2_of(plan.threads);
    sample = team >> log2_of(plan.groups), group = team & (plan.groups - 1);
    thread = threadIdx.x & (plan.threads - 1);
    column = thread & (plan.width - 1), row = thread >> log2_of(plan.width);
    step = plan.threads >> log2_of(plan.width);
    in_row = column * vector_size < plan.channels;
    channel = (group_set * plan.groups + group) * plan.channels + (in_row ? column * vector_size : 0);
  }
};

/// Sums over a team. Every thread of the block must call. `scratch` has one element a warp.
template <class A>
__device__ __forceinline__ A team_sum(A x, int threads, A* scratch) {
  return threads > kWarpSize ? block_sum(x, scratch) : warp_sum(x, threads);
}

/// A thread's vectors of a group, one for each of its rows below `rows`; zeros beyond.
template <class T, int V>
struct Held {
  Vector<T> vectors[V];

  __device__ __forceinline__ void load(const T* from, const Place& place, int64_t rows, int64_t stride) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int64_t row = place.row + k * place.step;
      vectors[k] = {};
      if (row < rows) vectors[k] = *reinterpret_cast<const Vector<T>*>(from + row * stride);
    }
  }
  __device__ __forceinline__ void keep_packed() {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (auto& vector : vectors) vector.keep_packed();
    }
  }
};

template <class A>
struct Statistics {
  A mean, rstd;

  /// Every thread of the block must call; `scratch` has one element a warp.
  template <class T, int V>
  __device__ __forceinline__ Statistics(Held<T, V>& x, const Place& place, int64_t rows, A over,
                                        const GroupNormMish& args, A* scratch) {
    A sum = 0, squares = 0;
#pragma unroll
    for (int k = 0; k < V; ++k)
#pragma unroll
      for (int i = 0; i < Vector<T>::kSize; ++i) sum += x.vectors[k][i];
    mean = team_sum(sum, args.plan.threads, scratch) * over;
    x.keep_packed();
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (place.row + k * place.step >= rows) continue;
#pragma unroll
      for (int i = 0; i < Vector<T>::kSize; ++i) {
        const A centered = x.vectors[k][i] - mean;
        squares += centered * centered;
      }
    }
    x.keep_packed();
    rstd = rsqrt(team_sum(squares, args.plan.threads, scratch) * over + static_cast<A>(args.eps));
  }
};

template <class T, class P, int V>
__global__ void __launch_bounds__(kMaxTeam) forward_kernel(GroupNormMish args) {
  using A = Accumulate<T>;
  constexpr int kSize = Vector<T>::kSize;
  __shared__ A scratch[kMaxTeam / kWarpSize];
  const int64_t channels = args.shape.channels, batch = args.shape.batch;
  const int samples = args.plan.samples();
  const A over = A(1) / static_cast<A>(args.shape.inner * args.plan.channels);
  const Place place(args.plan, blockIdx.x, kSize);
  for (int64_t base = int64_t{blockIdx.y} * samples; base < batch; base += int64_t{gridDim.y} * samples) {
    const bool here = base + place.sample < batch;
    const int64_t sample = here ? base + place.sample : 0, rows = here && place.in_row ? args.shape.inner : 0;
    const int64_t first = sample * args.shape.inner * channels + place.channel;
    Held<T, V> x, residual;
    x.load(static_cast<const T*>(args.input) + first, place, rows, channels);
    if (args.residual) residual.load(static_cast<const T*>(args.residual) + first, place, rows, channels);
    A weight[kSize], bias[kSize], scale[kSize], shift[kSize];
    load_channels(weight, at_or_null<P>(args.weight, place.channel), A(1));
    load_channels(bias, at_or_null<P>(args.bias, place.channel), A(0));
    load_channels(scale, at_or_null<T>(args.scale, sample * args.scale_stride + place.channel), A(1));
    load_channels(shift, at_or_null<T>(args.shift, sample * args.shift_stride + place.channel), A(0));
    const Statistics<A> s(x, place, rows, over, args, scratch);
#pragma unroll
    for (int i = 0; i < kSize; ++i) weight[i] *= s.rstd;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int64_t row = place.row + k * place.step;
      if (row >= rows) break;
      A out[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        out[i] = Mish<T>((x.vectors[k][i] - s.mean) * weight[i] + bias[i]).value * scale[i] + shift[i];
        if (args.residual) out[i] += residual.vectors[k][i];
      }
      store_channels<T, kSize>(static_cast<T*>(args.out) + first + row * channels, out);
    }
  }
}

/// Sums `values` over the threads of a warp that hold the same channels of the same group of the same sample. The whole
/// warp must call; each of those threads holds the sums.
template <class A, int kCount>
__device__ __forceinline__ void sum_over_rows(A (&values)[kCount], const NormPlan& plan) {
  const int within = plan.threads < kWarpSize ? plan.threads : kWarpSize;
#pragma unroll 1
  for (int offset = plan.width; offset < within; offset *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] += __shfl_xor_sync(0xffffffffu, values[i], offset);
  }
}

/// The same over the block, in a fixed order. Every thread of the block must call; thread i holds the sums of column
/// i % width of the block's group i / width, for as many as there are. `scratch` has kCount elements a thread.
template <class A, int kCount>
__device__ void sum_over_block(A (&values)[kCount], const Place& place, const NormPlan& plan, A* scratch) {
  sum_over_rows(values, plan);
  const int keys = plan.groups * plan.width;
  const int within = plan.threads < kWarpSize ? plan.threads : kWarpSize;
  const int stride = within > plan.width ? within : plan.width;  // from one writer of a key to the next
  const int key = place.group * plan.width + place.column;
  const int writers_of_team = plan.threads >> log2_of(stride);
  const int writer = place.sample * writers_of_team + (place.thread >> log2_of(stride));
  const int writers = plan.samples() * writers_of_team;
  if ((place.thread & (stride - 1)) < plan.width) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scratch[(i * writers + writer) * keys + key] = values[i];
  }
  __syncthreads();
  if (threadIdx.x < keys) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = 0;
      for (int w = 0; w < writers; ++w) values[i] += scratch[(i * writers + w) * keys + threadIdx.x];
    }
  }
  __syncthreads();
}

template <class T, class P, int V>
__global__ void __launch_bounds__(kMaxTeam, 2) backward_kernel(GroupNormMishBackward args) {
  using A = Accumulate<T>;
  constexpr int kSize = Vector<T>::kSize;
  __shared__ A scratch[kMaxTeam / kWarpSize], sums[2 * kSize * kMaxTeam];
  const GroupNormMish& in = args.forward;
  const NormPlan& plan = in.plan;
  const int64_t channels = in.shape.channels, batch = in.shape.batch;
  const A over = A(1) / static_cast<A>(in.shape.inner * plan.channels);
  const Place place(plan, blockIdx.x, kSize);
  A weight[kSize], bias[kSize], parameters[2 * kSize] = {};  // the latter: gradients of weight, then of bias
  load_channels(weight, at_or_null<P>(in.weight, place.channel), A(1));
  load_channels(bias, at_or_null<P>(in.bias, place.channel), A(0));
  for (int64_t base = int64_t{blockIdx.y} * plan.samples(); base < batch; base += int64_t{gridDim.y} * plan.samples()) {
    const bool here = base + place.sample < batch;
    const int64_t sample = here ? base + place.sample : 0, rows = here && place.in_row ? in.shape.inner : 0;
    const int64_t first = sample * in.shape.inner * channels + place.channel;
    Held<T, V> x, grad;
    x.load(static_cast<const T*>(in.input) + first, place, rows, channels);
    grad.load(static_cast<const T*>(args.grad) + first, place, rows, channels);
    A scale[kSize], films[2 * kSize] = {};  // the latter: gradients of scale, then of shift
    load_channels(scale, at_or_null<T>(in.scale, sample * in.scale_stride + place.channel), A(1));
    const Statistics<A> s(x, place, rows, over, in, scratch);
    A normalized_grad[V][kSize], sum = 0, dot = 0;  // the normalised input's gradient; its sums with 1 and with it
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (place.row + k * place.step >= rows) break;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const A normalized = (x.vectors[k][i] - s.mean) * s.rstd, g = grad.vectors[k][i];
        const Mish<T> mish(normalized * weight[i] + bias[i]);
        const A grad_u = g * scale[i] * mish.slope;
        parameters[i] += grad_u * normalized;
        parameters[kSize + i] += grad_u;
        films[i] += g * mish.value;
        films[kSize + i] += g;
        normalized_grad[k][i] = grad_u * weight[i];
        sum += normalized_grad[k][i];
        dot += normalized_grad[k][i] * normalized;
      }
    }
    x.keep_packed();
    const A mean = team_sum(sum, plan.threads, scratch) * over;
    const A slant = team_sum(dot, plan.threads, scratch) * over * s.rstd;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int64_t row = place.row + k * place.step;
      if (row >= rows || !args.grad_input) break;
      A out[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        out[i] = s.rstd * (normalized_grad[k][i] - mean - (x.vectors[k][i] - s.mean) * slant);
      store_channels<T, kSize>(static_cast<T*>(args.grad_input) + first + row * channels, out);
    }
    if (!args.grad_scale && !args.grad_shift) continue;
    if (plan.threads > kWarpSize)
      sum_over_block(films, place, plan, sums);
    else
      sum_over_rows(films, plan);
    if (rows == 0 || place.row != 0) continue;
    const int64_t pair = sample * channels + place.channel;
    if (args.grad_scale) store_channels<T, kSize>(static_cast<T*>(args.grad_scale) + pair, films);
    if (args.grad_shift) store_channels<T, kSize>(static_cast<T*>(args.grad_shift) + pair, films + kSize);
  }
  if (!args.partials) return;
  sum_over_block(parameters, place, plan, sums);
  const int column = threadIdx.x & (plan.width - 1), group = threadIdx.x >> log2_of(plan.width);
  if (group >= plan.groups || column * kSize >= plan.channels) return;
  const int64_t channel = (int64_t{blockIdx.x} * plan.groups + group) * plan.channels + column * kSize;
  A* to = static_cast<A*>(args.partials) + blockIdx.y * channels + channel;
  store_channels<A, kSize>(to, parameters);
  store_channels<A, kSize>(to + gridDim.y * channels, parameters + kSize);
}

/// Calls `f` with the number of vectors a thread holds as a constant.
template <class F>
cudaError_t dispatch_vectors(int vectors, F&& f) {
  switch (vectors) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 4: return f(std::integral_constant<int, 4>{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t forward(const GroupNormMish& args, cudaStream_t stream) {
  const int64_t samples = args.plan.samples();
  const dim3 blocks(args.shape.groups / args.plan.groups,
                    std::min((args.shape.batch + samples - 1) / samples, kMaxSlices));
  return dispatch_types(args, [&](auto tag, auto parameter) {
    return dispatch_vectors(args.plan.vectors, [&](auto vectors) {
      return launch(forward_kernel<typename decltype(tag)::type, typename decltype(parameter)::type, vectors.value>,
                    blocks, args.plan.block, stream, args);
    });
  });
}

cudaError_t backward(const GroupNormMishBackward& args, cudaStream_t stream) {
  const GroupNormMish& in = args.forward;
  const dim3 blocks(in.shape.groups / in.plan.groups, backward_slices(in.shape, in.plan));
  const auto error = dispatch_types(in, [&](auto tag, auto parameter) {
    return dispatch_vectors(in.plan.vectors, [&](auto vectors) {
      return launch(backward_kernel<typename decltype(tag)::type, typename decltype(parameter)::type, vectors.value>,
                    blocks, in.plan.block, stream, args);
    });
  });
  return error != cudaSuccess || !args.partials ? error : add_slices(args, stream);
}

}  // namespace dpa::kernels::channels_last
