// out = mish(group_norm(input)) * scale + shift + residual and its backward, on channels-last tensors, for groups that
// no team's registers hold (channels_last.cu; dimensions as there).
//
// cluster  `ranks` blocks that own one group of one sample at a time (plan.h): its rows are divided among them,
//          interleaved. They exchange moments and sums through distributed shared memory, in the order of their ranks
// block    one team, `width` threads along a row
// thread   one vector of every row that it owns, kMaxVectors rows at a time; the second pass finds them in L1 or L2
// grid     a cluster a group and slice of the samples. The backward adds the gradients of weight and bias up in
//          registers from sample to sample, and writes one partial sum a block.
//
// Moments are merged, a thread's rows at a time, so a mean far from zero costs no digits.
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/group_norm_mish/large_groups.h"
#include "kernels/cuda/group_norm_mish/team.cuh"

namespace dpa::kernels::channels_last::large_groups {
namespace {

constexpr int kWarps = kMaxTeam / kWarpSize, kRows = kMaxVectors;

/// Where a thread stands in its cluster, and the cluster's group.
struct Place {
  int rank, ranks, channels, inner, first_channel;  // the latter: of the group
  ThreadCoord coord;

  __device__ __forceinline__ Place(const GroupNormMish& args, int owned)
      : rank(static_cast<int>(blockIdx.x) & (args.plan.ranks - 1)),
        ranks(args.plan.ranks),
        channels(static_cast<int>(args.shape.channels)),
        inner(static_cast<int>(args.shape.inner)),
        coord(args.plan, static_cast<int>(blockIdx.x) / args.plan.ranks, owned) {
    first_channel = static_cast<int>(blockIdx.x) / ranks * args.plan.channels;
    coord.row += rank * coord.step, coord.step *= ranks;
  }
  /// Where the thread's first channel lies in a sample's first row.
  __device__ __forceinline__ int64_t offset(int64_t sample) const {
    return sample * (int64_t{inner} * channels) + coord.channel;
  }
  /// Calls `use` with where the thread's next kRows rows are, until there are none.
  template <class Use>
  __device__ __forceinline__ void each(Use&& use) const {
    for (ThreadCoord at = coord; coord.in_row && at.row < inner; at.row += kRows * at.step) use(at);
  }
  /// What all threads of the cluster wrote to shared memory is visible after.
  __device__ __forceinline__ void sync() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (ranks > 1) return ptx::cluster_sync();
#endif
    __syncthreads();
  }
};

struct Scratch {
  float warps[kWarps][3], block[3];
};

/// Of a sample's group. Every thread of the cluster must call; `scratch` may be used again behind another `sync`.
template <class T, int C>
__device__ __forceinline__ Statistics statistics_of(const Place& place, const T* from, double eps, Scratch& scratch) {
  Moments m;
  place.each([&](const ThreadCoord& at) {
    Held<T, C, kRows> x;
    x.load(from, at, place.inner, place.channels);
    float sum = 0, squares = 0;
    int rows = 0;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      rows += at.row + k * at.step < place.inner;
#pragma unroll
      for (int i = 0; i < C; ++i) sum += x.vectors[k][i];
    }
    const float count = static_cast<float>(rows * C), mean = sum / count;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (int i = 0; i < C; ++i) {
        const float centered = k < rows ? x.vectors[k][i] - mean : 0.0f;
        squares += centered * centered;
      }
    }
    m.merge(count, mean, squares);
  });
  for (int offset = 1; offset < kWarpSize; offset *= 2) m.merge_lane(offset);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (lane == 0) scratch.warps[warp][0] = m.count, scratch.warps[warp][1] = m.mean, scratch.warps[warp][2] = m.squares;
  __syncthreads();
  if (threadIdx.x == 0) {
    Moments all;
    for (const auto& of : scratch.warps) all.merge(of[0], of[1], of[2]);
    scratch.block[0] = all.count, scratch.block[1] = all.mean, scratch.block[2] = all.squares;
  }
  place.sync();
  Moments all;
  for (int rank = 0; rank < place.ranks; ++rank)
    all.merge(load_of_peer(scratch.block, rank), load_of_peer(scratch.block + 1, rank),
              load_of_peer(scratch.block + 2, rank));
  return {all.mean, rsqrtf(all.squares / all.count + static_cast<float>(eps))};
}

template <class T, class P, int C>
__global__ void __launch_bounds__(kMaxTeam, 2) forward_kernel(const __grid_constant__ GroupNormMish args) {
  __shared__ Scratch scratch[2];  // in turns: a sample's `sync` ends all reading of the one before
  const Place place(args, C);
  const ThreadCoord& coord = place.coord;
  float weight[C], bias[C], scale[C], shift[C];
  load_channels(weight, at_or_null<P>(args.weight, coord.channel), 1.0f);
  load_channels(bias, at_or_null<P>(args.bias, coord.channel), 0.0f);
  int turn = 0;
  for (int64_t sample = blockIdx.y; sample < args.shape.batch; sample += gridDim.y, turn ^= 1) {
    const T* const from = static_cast<const T*>(args.input) + place.offset(sample);
    load_channels(scale, at_or_null<T>(args.scale, sample * args.scale_stride + coord.channel), 1.0f);
    load_channels(shift, at_or_null<T>(args.shift, sample * args.shift_stride + coord.channel), 0.0f);
    const Statistics s = statistics_of<T, C>(place, from, args.eps, scratch[turn]);
    place.each([&](const ThreadCoord& at) {
      Held<T, C, kRows> x, residual{};
      x.load(from, at, place.inner, place.channels);
      if (args.residual)
        residual.load(static_cast<const T*>(args.residual) + place.offset(sample), at, place.inner, place.channels);
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const int row = at.row + k * at.step;
        if (row >= place.inner) break;
        float out[C];
#pragma unroll
        for (int i = 0; i < C; ++i)
          out[i] = Mish(s.normalized<T>(x.vectors[k][i]) * weight[i] + bias[i]).value * scale[i] + shift[i] +
                   residual.vectors[k][i];
        const int64_t to = place.offset(sample) + row * place.channels;
        if constexpr (sizeof(T) == 4)
          if (args.halves) store_halves<C>(args.halves, to, place.offset(args.shape.batch) - coord.channel, out);
        if (args.out) store_channels<C>(static_cast<T*>(args.out) + to, out);
      }
    });
  }
  place.sync();
}

template <class T, class P, int C>
__global__ void __launch_bounds__(kMaxTeam, 1) backward_kernel(const __grid_constant__ GroupNormMishBackward args) {
  __shared__ Scratch scratch;
  __shared__ float warps[kWarps], exchanged[2];
  extern __shared__ float films[];  // (2, channels of the group, filled up), then 3 * C of each of `plan.sum_places()`
  const GroupNormMish& in = args.forward;
  const NormPlan& plan = in.plan;
  const Place place(in, C);
  const ThreadCoord& coord = place.coord;
  const int width = plan.width * C;
  float* const sums = films + 2 * width;
  const float over = 1.0f / (static_cast<float>(place.inner) * static_cast<float>(plan.channels));
  float weight[C], bias[C], scale[C], parameters[3 * C] = {};
  load_channels(weight, at_or_null<P>(in.weight, coord.channel), 1.0f);
  load_channels(bias, at_or_null<P>(in.bias, coord.channel), 0.0f);
  for (int64_t sample = blockIdx.y; sample < in.shape.batch; sample += gridDim.y) {
    const T* const from = static_cast<const T*>(in.input) + place.offset(sample);
    const T* const grads = static_cast<const T*>(args.grad) + place.offset(sample);
    load_channels(scale, at_or_null<T>(in.scale, sample * in.scale_stride + coord.channel), 1.0f);
    const Statistics s = statistics_of<T, C>(place, from, in.eps, scratch);
    float of_films[2 * C] = {}, sum = 0, dot = 0;  // as in channels_last.cu
    place.each([&](const ThreadCoord& at) {
      Held<T, C, kRows> x, grad;
      x.load(from, at, place.inner, place.channels), grad.load(grads, at, place.inner, place.channels);
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        if (at.row + k * at.step >= place.inner) break;
#pragma unroll
        for (int i = 0; i < C; ++i) {
          const float normalized = s.normalized<T>(x.vectors[k][i]), g = grad.vectors[k][i];
          const Mish mish(normalized * weight[i] + bias[i]);
          const float grad_u = g * mish.slope * scale[i];
          of_films[i] += g * mish.value, of_films[C + i] += g;
          parameters[i] += grad_u * normalized, parameters[C + i] += grad_u;
          sum += grad_u * weight[i], dot += grad_u * weight[i] * normalized;
        }
      }
    });
    const float block_total = block_sum(sum, warps), block_dot = block_sum(dot, warps);
    if (threadIdx.x == 0) exchanged[0] = block_total, exchanged[1] = block_dot;
    sum_over_block<C>(of_films, coord, plan, sums,
                      [&](int i, int, int channel, float value) { films[i / C * width + channel + i % C] = value; });
    place.sync();  // the next sample's first one ends all reading of what is exchanged here
    sum = dot = 0;
    for (int rank = 0; rank < place.ranks; ++rank)
      sum += load_of_peer(exchanged, rank), dot += load_of_peer(exchanged + 1, rank);
    const float mean = -sum * over * s.rstd, slant = -dot * over * s.rstd;
    for (int item = place.rank * kMaxTeam + threadIdx.x; item < 2 * plan.channels; item += place.ranks * kMaxTeam) {
      const int which = item / plan.channels, channel = item - which * plan.channels;
      T* const to = static_cast<T*>(which == 0 ? args.grad_scale : args.grad_shift);
      float total = 0;
      for (int rank = 0; to && rank < place.ranks; ++rank) total += load_of_peer(films + which * width + channel, rank);
      if (to) to[sample * place.channels + place.first_channel + channel] = narrow<T>(total);
    }
    if (!args.grad_input) continue;
    place.each([&](const ThreadCoord& at) {
      Held<T, C, kRows> x, grad;
      x.load(from, at, place.inner, place.channels), grad.load(grads, at, place.inner, place.channels);
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const int row = at.row + k * at.step;
        if (row >= place.inner) break;
        float out[C];
#pragma unroll
        for (int i = 0; i < C; ++i) {
          const float normalized = s.normalized<T>(x.vectors[k][i]);
          const float grad_u = grad.vectors[k][i] * Mish(normalized * weight[i] + bias[i]).slope * scale[i];
          out[i] = normalized * slant + (grad_u * weight[i] * s.rstd + mean);
          parameters[2 * C + i] += out[i];
        }
        store_channels<C>(static_cast<T*>(args.grad_input) + place.offset(sample) + row * place.channels, out);
      }
    });
  }
  place.sync();
  if (!args.partials) return;
  const int64_t slices = int64_t{gridDim.y} * place.ranks, slice = int64_t{blockIdx.y} * place.ranks + place.rank;
  sum_over_block<C>(parameters, coord, plan, sums, [&](int i, int, int channel, float value) {
    if (i / C == 2 && !args.sums) return;
    args.partials[(i / C * slices + slice) * place.channels + place.first_channel + channel + i % C] = value;
  });
}

/// Calls `f` with the channels of a thread's vector as a constant.
template <class T, class F>
cudaError_t dispatch_owned(int owned, F&& f) {
  return dispatch_value<8, 4, 2, 1>(owned, [&](auto channels) {
    if constexpr (channels.value > kWhole<T>)
      return cudaErrorInvalidValue;
    else
      return f(channels);
  });
}

/// `shared`: dynamic shared memory, in bytes.
template <class Args>
cudaError_t launch_clusters(void (*kernel)(Args), const GroupNormMish& in, size_t shared, cudaStream_t stream,
                            const Args& args) {
  const int ranks = in.plan.ranks;
  const dim3 blocks(static_cast<unsigned>(in.shape.groups * ranks),
                    static_cast<unsigned>(slices(in.shape, in.plan) / ranks));
  return LaunchConfig(blocks, kMaxTeam, stream, shared).clusters(ranks > 1 ? ranks : 0).launch(kernel, args);
}

}  // namespace

cudaError_t forward(const GroupNormMish& args, cudaStream_t stream) {
  return dispatch_types(args, [&](auto tag, auto parameter) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(parameter)::type;
    return dispatch_owned<T>(args.plan.owned, [&](auto owned) {
      return launch_clusters(forward_kernel<T, P, owned.value>, args, 0, stream, args);
    });
  });
}

cudaError_t backward(const GroupNormMishBackward& args, cudaStream_t stream) {
  const GroupNormMish& in = args.forward;
  return dispatch_types(in, [&](auto tag, auto parameter) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(parameter)::type;
    return dispatch_owned<T>(in.plan.owned, [&](auto owned) {
      constexpr int C = owned.value;
      const size_t shared = sizeof(float) * C * (3 * in.plan.sum_places() + 2 * in.plan.width);
      return launch_clusters(backward_kernel<T, P, C>, in, shared, stream, args);
    });
  });
}

}  // namespace dpa::kernels::channels_last::large_groups
