// The layered path: correct for every architecture and batch, two kernels a convolution. C channels, T times, A
// actions, n = (b, t).
//
//   head_kernel      raw[n, c] = sum W[tap, a, c] x[b, t + tap - k/2, a] + bias, residual[n, c] = sum R[a, c] x[n, a] + bias
//                    a thread an output; condition_data replaces x where condition_mask is set (inpainting)
//   conv_kernel      raw[n', o] = sum_{tap, i} W[tap, i, o] value[b, t stride + first + tap, i] + bias
//                    a block owns 16 output channels (a row tile) and 32 columns n; split-K over its 8 warps, which
//                    read weights once, straight from memory, in the packed order; partial sums meet in shared memory
//   epilogue_kernel  value = mish(group_norm(raw)) scale + shift + residual, or relu(...); kept where a layer needs it
//                    a block owns a sample's group; without a norm a group is all channels
//   tail_kernel      eps = W value + bias and the scheduler's step; a warp owns one (b, t)
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/unet1d/paths.h"
#include "kernels/cuda/unet1d/tile.cuh"
#include "kernels/math/diffusion_step.h"
#include "kernels/math/mish.h"

namespace dpa::kernels::unet1d {
namespace {

constexpr int kThreads = 256, kWarps = 8, kColumnTiles = 4, kColumns = kColumnTiles * 8;
static_assert(kColumns == kLayeredColumns, "`reject` knows how many columns the grid covers");

struct Condition {
  const float* condition_data;
  const uint8_t* condition_mask;
  __device__ float operator()(float x, int64_t i) const {
    return condition_data && condition_mask[i] ? condition_data[i] : x;
  }
};

struct HeadArguments {
  const float *sample, *weights, *bias, *residual_weights, *residual_bias;
  Condition condition;
  const float* local;  // is added to the residual, or null
  float *raw, *residual;
  int batch, times, actions, channels, taps;
};

__global__ void head_kernel(const HeadArguments h) {
  const int64_t e = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (e >= static_cast<int64_t>(h.batch) * h.times * h.channels) return;
  const int c = static_cast<int>(e % h.channels), t = static_cast<int>(e / h.channels % h.times);
  const int64_t n = e / h.channels;
  float sum = h.bias[c], residual = h.residual_bias[c] + (h.local ? h.local[e] : 0.0f);
  for (int tap = 0; tap < h.taps; tap++) {
    const int at = t + tap - h.taps / 2;
    if (at < 0 || at >= h.times) continue;
    for (int a = 0; a < h.actions; a++) {
      const int64_t i = (n - t + at) * h.actions + a;
      const float x = h.condition(h.sample[i], i);
      sum = fmaf(x, h.weights[(static_cast<int64_t>(tap) * h.actions + a) * h.channels + c], sum);
      if (at == t) residual = fmaf(x, h.residual_weights[static_cast<int64_t>(a) * h.channels + c], residual);
    }
  }
  h.raw[e] = sum;
  h.residual[e] = residual;
}

struct ConvArguments {
  const uint8_t* weights[2];
  const float* bias[2];
  const float* scale[2];  // null without
  const float *value, *skip;
  float* out[2];
  Tiling tiling;
  int taps[2], first[2];
  int batch, times_in, columns_per_sample, times_out, stride, upsample;
  int channels_in, channels_skip, channels_out, slices_out, slices_in;
};

template <class Weight>
__global__ void __launch_bounds__(kThreads) conv_kernel(const __grid_constant__ ConvArguments c) {
#if __CUDA_ARCH__ >= 800  // the matrix instructions for bfloat16; the op refuses older GPUs
  using Math = Tile<Weight>;
  __shared__ float partial[kWarps][16][kColumns + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, segment = blockIdx.z;
  const int slice_out = blockIdx.x / c.tiling.row_tiles, row_tile = blockIdx.x % c.tiling.row_tiles;
  const int columns = c.batch * c.columns_per_sample;
  const int per_tap = c.tiling.in_steps + c.tiling.skip_steps, steps = c.taps[segment] * per_tap;
  int64_t sample[kColumnTiles];
  int time[kColumnTiles];
#pragma unroll
  for (int i = 0; i < kColumnTiles; i++) {
    const int n = blockIdx.y * kColumns + i * 8 + lane / 4;
    sample[i] = n < columns ? n / c.columns_per_sample : -1;
    time[i] = n % c.columns_per_sample * c.stride + c.first[segment];
  }
  typename Math::Sum sum[kColumnTiles];
  for (int step = warp; step < steps * c.slices_in; step += kWarps) {
    const int slice_in = step / steps, k = step % steps, tap = k / per_tap;
    const int64_t tile =
        (static_cast<int64_t>(slice_out * c.slices_in + slice_in) * steps + k) * c.tiling.row_tiles + row_tile;
    const typename Math::A a = Math::load(c.weights[segment] + tile * Math::kBytes, lane);
    const bool from_skip = k % per_tap >= c.tiling.in_steps;
    const int within = (k % per_tap - (from_skip ? c.tiling.in_steps : 0)) * 16,
              width = from_skip ? c.tiling.skip : c.tiling.in;
    const float* source = from_skip ? c.skip : c.value;
    const int channels = from_skip ? c.channels_skip : c.channels_in, channel0 = slice_in * width + within;
#pragma unroll
    for (int i = 0; i < kColumnTiles; i++) {
      const int t = time[i] + tap;
      const bool inside = sample[i] >= 0 && t >= 0 && t < c.times_in;
      const float* row = source + (sample[i] * c.times_in + t) * channels + channel0;
      Math::multiply(sum[i], a,
                     Math::load_b([&](int j) { return inside && within + j < width ? row[j] : 0.0f; }, lane));
    }
  }
#pragma unroll
  for (int i = 0; i < kColumnTiles; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) partial[warp][lane / 4 + j / 2 * 8][i * 8 + lane % 4 * 2 + j % 2] = sum[i][j];
  }
  __syncthreads();
  for (int e = threadIdx.x; e < 16 * kColumns; e += kThreads) {
    const int row = row_tile * 16 + e % 16, n = blockIdx.y * kColumns + e / 16;
    if (row >= c.tiling.rows || n >= columns) continue;
    const int channel = slice_out * c.tiling.rows + row;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; w++) total += partial[w][e % 16][e / 16];
    int64_t at = n;
    if (c.upsample)
      at = static_cast<int64_t>(n / c.columns_per_sample) * c.times_out + n % c.columns_per_sample * 2 + segment;
    if (c.scale[segment]) total *= c.scale[segment][channel];
    c.out[segment][at * c.channels_out + channel] = total + c.bias[segment][channel];
  }
#endif
}

struct EpilogueArguments {
  const float *raw, *norm, *film_step, *film_cond;  // rows of samples; film null without
  int64_t film_step_stride, film_cond_stride;
  int film_scale;
  float *value, *residual, *skip;
  bool relu, add, keep;
  int times, channels, groups;
  int counted;  // channels of a group that the norm counts: the first ones
};

__global__ void __launch_bounds__(kThreads) epilogue_kernel(const EpilogueArguments f) {
  __shared__ float sums[kWarps];
  const int b = blockIdx.x / f.groups, group = blockIdx.x % f.groups, width = f.channels / f.groups,
            count = width * f.times;
  const float inverse_count = 1.0f / static_cast<float>(f.counted * f.times);
  const int64_t base = static_cast<int64_t>(b) * f.times * f.channels + group * width;
  auto at = [&](int i) { return base + static_cast<int64_t>(i / width) * f.channels + i % width; };
  auto total = [&](float x) {
#pragma unroll
    for (int m = 16; m; m >>= 1) x += __shfl_xor_sync(~0u, x, m);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    float all = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; w++) all += sums[w];
    return all;
  };
  float mean = 0.0f, inverse = 1.0f;
  if (f.norm) {
    float sum = 0.0f, squares = 0.0f;
    for (int i = threadIdx.x; i < count; i += kThreads) sum += f.raw[at(i)];
    mean = total(sum) * inverse_count;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const float d = i % width < f.counted ? f.raw[at(i)] - mean : 0.0f;
      squares = fmaf(d, d, squares);
    }
    inverse = rsqrtf(total(squares) * inverse_count + 1e-5f);
  }
  const float* step = f.film_step + b * f.film_step_stride;
  const float* cond = f.film_cond + b * f.film_cond_stride;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int c = group * width + i % width;
    float y = f.raw[at(i)];
    if (f.norm) {
      y = fmaf((y - mean) * inverse, f.norm[c], f.norm[f.channels + c]);
      y = !f.relu ? math::mish(y) : y < 0.0f ? 0.0f : y;
    }
    if (f.film_step) {
      auto parameter = [&](int j) { return f.film_cond ? step[j] + cond[j] : step[j]; };
      if (f.film_scale) y *= parameter(c);
      y += parameter(f.film_scale ? f.channels + c : c);
    }
    if (f.add) y += f.residual[at(i)];
    f.value[at(i)] = y;
    if (f.keep) f.residual[at(i)] = y;
    if (f.skip) f.skip[at(i)] = y;
  }
}

struct TailArguments {
  const float *value, *weights, *bias, *table, *noise;
  Condition condition;
  float clip;
  const float* sample;
  float* out;
  bool last;
  int columns, actions, channels;
};

__global__ void __launch_bounds__(kThreads) tail_kernel(const TailArguments a) {
  const int n = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (n >= a.columns) return;
  for (int d = 0; d < a.actions; d++) {
    float output = 0.0f;
    for (int c = lane; c < a.channels; c += 32)
      output = fmaf(a.value[static_cast<int64_t>(n) * a.channels + c],
                    a.weights[static_cast<int64_t>(d) * a.channels + c], output);
#pragma unroll
    for (int m = 16; m; m >>= 1) output += __shfl_xor_sync(~0u, output, m);
    if (lane) continue;
    output += a.bias[d];
    const int64_t i = static_cast<int64_t>(n) * a.actions + d;
    if (a.table) {
      const math::SchedulerStep<float> step(a.table, 0, a.clip, a.noise != nullptr);
      output = step.step(output, a.condition(a.sample[i], i), a.noise ? a.noise[i] : 0.0f);
      if (a.last) output = a.condition(output, i);
    }
    a.out[i] = output;
  }
}

template <class Weight>
struct Runner {
  const Plan& plan;
  const Call& call;
  const Workspace& at;
  cudaStream_t stream;
  const uint8_t* packed = static_cast<const uint8_t*>(call.packed);
  const float* floats = reinterpret_cast<const float*>(packed + plan.floats);
  float* buffer(size_t offset) const {
    return reinterpret_cast<float*>(static_cast<uint8_t*>(call.workspace) + offset);
  }
  int times(int level) const { return call.horizon >> level; }
  Condition condition() const { return {call.condition_mask ? call.condition_data : nullptr, call.condition_mask}; }

  cudaError_t epilogue(int step, int64_t norm, int groups, int64_t film, bool add, bool keep, int skip, Width dim,
                       int level) const {
    EpilogueArguments f = {};
    f.raw = buffer(at.raw), f.value = buffer(at.value), f.residual = buffer(at.residual);
    f.skip = skip >= 0 ? buffer(at.skips[skip]) : nullptr;
    f.norm = norm >= 0 ? floats + norm : nullptr;
    if (film >= 0) {
      const FilmView view = film_view(plan, call, at);
      f.film_step = view.step + step * view.step_stride + film;
      f.film_step_stride = view.sample_stride;
      f.film_cond = view.cond ? view.cond + film : nullptr;
      f.film_cond_stride = plan.film_rows;
      f.film_scale = plan.config.film_scale;
    }
    f.relu = plan.config.relu, f.add = add, f.keep = keep, f.times = times(level), f.channels = dim.channels,
    f.groups = norm >= 0 ? groups : 1;
    f.counted = dim.own / f.groups;
    return launch(epilogue_kernel, call.batch * f.groups, kThreads, stream, f);
  }

  cudaError_t convolve(const Conv& conv) const {
    ConvArguments c = {};
    c.tiling = tiling(plan, conv);
    for (int s = 0; s < conv.num_segments; s++) {
      c.weights[s] = packed + conv.segments[s].weights;
      c.bias[s] = floats + conv.bias[s];
      c.scale[s] = conv.scale >= 0 ? floats + conv.scale + s * conv.channels_out : nullptr;
      c.taps[s] = conv.segments[s].taps, c.first[s] = conv.segments[s].first;
    }
    c.out[0] = buffer(at.raw);
    c.out[1] = conv.upsample ? c.out[0] : buffer(at.residual);
    c.value = buffer(at.value);
    c.skip = conv.skip_in >= 0 ? buffer(at.skips[conv.skip_in]) : nullptr;
    c.batch = call.batch, c.times_in = times(conv.level_in), c.times_out = times(conv.level_out);
    c.columns_per_sample = conv.upsample ? c.times_in : c.times_out;
    c.stride = conv.stride, c.upsample = conv.upsample;
    c.channels_in = conv.channels_in, c.channels_skip = conv.channels_skip, c.channels_out = conv.channels_out;
    c.slices_out = plan.slices_out, c.slices_in = conv.slices_in;
    const dim3 grid(c.slices_out * c.tiling.row_tiles, ceil_div(c.batch * c.columns_per_sample, kColumns),
                    conv.num_segments);
    return launch(conv_kernel<Weight>, grid, kThreads, stream, c);
  }

  cudaError_t step(int index) const {
    const int dim = plan.config.down_dims[0], actions = plan.config.action_dim, columns = call.batch * call.horizon;
    const float* sample = index == 0 ? call.initial : buffer(at.sample);
    HeadArguments head = {};
    head.sample = sample, head.condition = condition(), head.raw = buffer(at.raw), head.residual = buffer(at.residual);
    head.weights = floats + plan.head.weights, head.bias = floats + plan.head.bias;
    head.residual_weights = floats + plan.head.residual, head.residual_bias = floats + plan.head.residual_bias;
    head.batch = call.batch, head.times = call.horizon, head.actions = actions, head.channels = dim;
    head.taps = plan.config.kernel_size;
    head.local = call.local ? call.local + int64_t{index} * columns * dim : nullptr;
    cudaError_t error =
        launch(head_kernel, grid_for(static_cast<int64_t>(columns) * dim, kThreads), kThreads, stream, head);
    if (error != cudaSuccess) return error;
    error = epilogue(index, plan.head.norm, plan.config.num_groups, plan.head.film, false, false, -1,
                     plan.config.width(0), 0);
    for (const Conv& conv : plan.convs) {
      if (error != cudaSuccess) return error;
      error = convolve(conv);
      if (error != cudaSuccess) return error;
      error = epilogue(index, conv.norm, conv.groups, conv.film, conv.add, conv.keep, conv.skip,
                       {conv.channels_out, conv.counted}, conv.level_out);
    }
    if (error != cudaSuccess) return error;
    TailArguments tail = {};
    tail.value = buffer(at.value), tail.sample = sample, tail.condition = condition();
    tail.weights = floats + plan.tail.weights, tail.bias = floats + plan.tail.bias, tail.clip = call.clip;
    tail.table = call.table ? call.table + index * 6 : nullptr;
    tail.noise = call.noise ? call.noise + static_cast<int64_t>(index) * columns * actions : nullptr;
    tail.last = index + 1 == call.steps, tail.out = tail.last ? call.output : buffer(at.sample);
    tail.columns = columns, tail.actions = actions, tail.channels = dim;
    return launch(tail_kernel, grid_for(columns, kWarps), kThreads, stream, tail);
  }
};

}  // namespace

cudaError_t run_layered(const Plan& plan, const Call& call, const Workspace& at, cudaStream_t stream) {
  return dispatch_weights(plan.dtype, [&](auto tag) {
    const Runner<typename decltype(tag)::type> runner = {plan, call, at, stream};
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < call.steps && error == cudaSuccess; i++) error = runner.step(i);
    return error;
  });
}

}  // namespace dpa::kernels::unet1d
