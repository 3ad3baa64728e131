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
// The statistics are taken in two passes over registers, so a mean far from zero costs no digits. Groups that no team's
// registers hold: large_groups.cu.
#include "kernels/cuda/group_norm_mish/large_groups.h"
#include "kernels/cuda/group_norm_mish/team.cuh"

namespace dpa::kernels::channels_last {
namespace {

/// `kHalves`: the output is wanted in halves, too.
template <class T, class P, int kChannels, int V, bool kHalves>
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
      if constexpr (kHalves) {
        store_halves<kChannels>(args.halves, at, batch * (inner * channels), out);
        if (!args.out) continue;
      }
      store_channels<kChannels>(static_cast<T*>(args.out) + at, out);
    }
    x = next;
  }
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
  if (args.plan.ranks > 0) return large_groups::forward(args, stream);
  const dim3 blocks(args.shape.groups / args.plan.groups, slices(args.shape, args.plan));
  return dispatch_types(args, [&](auto tag, auto parameter) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(parameter)::type;
    return dispatch_vectors<T>(args.plan, [&](auto owned, auto vectors) {
      const auto with = [&](auto halves) {
        return launch_dependent(forward_kernel<T, P, owned.value, vectors.value, halves.value>, blocks, args.plan.block,
                                stream, args);
      };
      if constexpr (sizeof(T) == 4)
        if (args.halves) return with(std::true_type());
      return with(std::false_type());
    });
  });
}

cudaError_t backward(const GroupNormMishBackward& args, cudaStream_t stream) {
  const GroupNormMish& in = args.forward;
  if (in.plan.ranks > 0) return large_groups::backward(args, stream);
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
