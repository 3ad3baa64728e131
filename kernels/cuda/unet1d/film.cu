// FiLM out of the loop.
//
//   e_i = sin(t f_i), e_{D/2 + i} = cos(t f_i), f_i = exp(-i log(10000) / (D/2 - 1)); then GEMMs in float32, with
//   weights as packed: out[n, r] = act(sum_c w[r, c] act(in[n, c]) + b[r])
//
//   dense_kernel   two GEMMs that do not depend on one another, such as the first of the timesteps' and the
//                  observation's. A block owns 32 rows and 8 samples of one: the samples' inputs lie in shared memory,
//                  512 columns at a time; a warp owns 4 rows and reads each weight once for the 8 samples, a lane four
//                  neighbouring columns.
//   table_kernel   the widest GEMM, for many timesteps. A block owns 128 rows and 32 samples, 32 columns at a time,
//                  which lie in shared memory column by column; a thread owns 8 rows and 4 samples.
// A call is three launches: each costs more than the small GEMMs do. Where the timesteps' part is there already it
// is one, whose blocks add the observation's rows to all steps of that part.
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/unet1d/film.h"
#include "kernels/math/mish.h"

namespace dpa::kernels::unet1d {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kRowsPerWarp = 4, kRows = kWarps * kRowsPerWarp, kSamples = 8,
              kColumns = 512;

struct Dense {
  const void* weights;
  const float* bias;       // or null
  const float* in;         // (samples, columns), or
  const float* timesteps;  // (samples): `in` is their sinusoids
  float* out;
  int samples, rows, columns;
  bool mish_in, mish_out;
  const float* part = nullptr;  // (parts, rows), of one sample: out is (parts, rows), its sum with each of them
  int parts = 0;

  __host__ __device__ int row_blocks() const { return (rows + kRows - 1) / kRows; }
  __host__ __device__ int blocks() const { return row_blocks() * ((samples + kSamples - 1) / kSamples); }
};

struct DensePair {
  Dense of[2];
};

__device__ __noinline__ float sinusoid(float timestep, int i, int dim) {
  const int half = dim / 2;
  const float rate = expf(static_cast<float>(i % half) * -(9.210340371976184f / static_cast<float>(half - 1)));
  return i < half ? sinf(timestep * rate) : cosf(timestep * rate);
}

// Neighbouring elements of a row, from `column` on: four where columns come in fours, which aligns every row, else one.
template <bool kFour, class T>
__device__ __forceinline__ float4 load_some(const T* row, int column) {
  if constexpr (!kFour) return make_float4(widen(row[column]), 0.0f, 0.0f, 0.0f);
  const auto four = *reinterpret_cast<const Vector<T, 4>*>(row + column);
  return make_float4(widen(four.data[0]), widen(four.data[1]), widen(four.data[2]), widen(four.data[3]));
}

// The inputs of a block's samples at kColumns columns; of samples that there are not, anything. Each thread loads its
// share. Long loops stay loops, here and below: the code is cold whenever it runs, and fetching it takes longer.
template <bool kFour>
__device__ __forceinline__ void load_inputs(const Dense& d, int sample0, int column0, float (*in)[kColumns]) {
  constexpr int kWidth = kFour ? 4 : 1;
  const int columns = min(kColumns, d.columns - column0), count = min(kSamples, d.samples - sample0);
  for (int n = threadIdx.x / 32; n < count; n += kWarps) {
    float* to = in[n];
    if (d.timesteps) {
#pragma unroll 1
      for (int c = threadIdx.x % 32; c < columns; c += 32)
        to[c] = sinusoid(d.timesteps[sample0 + n], column0 + c, d.columns);
      continue;
    }
    const float* from = d.in + static_cast<int64_t>(sample0 + n) * d.columns + column0;
#pragma unroll 4
    for (int c = threadIdx.x % 32 * kWidth; c < columns; c += 32 * kWidth) {
      if constexpr (kFour)
        *reinterpret_cast<float4*>(to + c) = *reinterpret_cast<const float4*>(from + c);
      else
        to[c] = from[c];
    }
    if (!d.mish_in) continue;
    __syncwarp();
#pragma unroll 1
    for (int c = threadIdx.x % 32; c < columns; c += 32) to[c] = math::mish(to[c]);
  }
}

// 2 M sums of every lane over the warp: each halving leaves a lane with half of them, until lane i holds sum i, in the
// first place.
template <int M>
__device__ __forceinline__ void fold(float* sum, int lane) {
  const bool upper = lane & M;
#pragma unroll
  for (int i = 0; i < M; i++) {
    const float kept = upper ? sum[i + M] : sum[i], given = upper ? sum[i] : sum[i + M];
    sum[i] = kept + __shfl_xor_sync(~0u, given, M);
  }
  if constexpr (M > 1) fold<M / 2>(sum, lane);
}

// Adds a block's values, of rows from `row0` on, to those of every part. A thread holds the value of its row where
// `any`; all of the block's come here. `values`: kRows floats of shared memory, which may be in use until now.
__device__ __forceinline__ void add_to_parts(const Dense& d, float value, bool any, int row0, float* values) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();
  if (any) values[warp * kRowsPerWarp + lane / kSamples] = value;
  __syncthreads();
  if (row0 + lane >= d.rows) return;
  static_assert(kRows == 32, "a lane a row");
#pragma unroll 4
  for (int part = warp; part < d.parts; part += kWarps) {
    const int64_t at = static_cast<int64_t>(part) * d.rows + row0 + lane;
    d.out[at] = d.part[at] + values[lane];
  }
}

template <class Weight, bool kFour>
__global__ void __launch_bounds__(kThreads) dense_kernel(const __grid_constant__ DensePair pair) {
  __shared__ __align__(16) float in[kSamples][kColumns];
  const int which = static_cast<int>(blockIdx.x) < pair.of[0].blocks() ? 0 : 1;
  const Dense& d = pair.of[which];
  const int block = blockIdx.x - (which ? pair.of[0].blocks() : 0), sample0 = block / d.row_blocks() * kSamples;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row0 = block % d.row_blocks() * kRows + warp * kRowsPerWarp;
  const Weight* rows[kRowsPerWarp];
#pragma unroll
  for (int r = 0; r < kRowsPerWarp; r++)
    rows[r] = static_cast<const Weight*>(d.weights) + static_cast<int64_t>(min(row0 + r, d.rows - 1)) * d.columns;
  float sum[kRowsPerWarp * kSamples] = {};
  for (int column0 = 0; column0 < d.columns; column0 += kColumns) {
    __syncthreads();
    load_inputs<kFour>(d, sample0, column0, in);
    __syncthreads();
    constexpr int kWidth = kFour ? 4 : 1;
#pragma unroll 1
    for (int c = lane * kWidth; c < min(kColumns, d.columns - column0); c += 32 * kWidth) {
      float4 w[kRowsPerWarp];
#pragma unroll
      for (int r = 0; r < kRowsPerWarp; r++) w[r] = load_some<kFour>(rows[r], column0 + c);
#pragma unroll
      for (int n = 0; n < kSamples; n++) {
        const float4 x = load_some<kFour>(in[n], c);
#pragma unroll
        for (int r = 0; r < kRowsPerWarp; r++) {
          float& s = sum[r * kSamples + n];
          s = fmaf(w[r].x, x.x, s);
          if (kFour) s = fmaf(w[r].y, x.y, fmaf(w[r].z, x.z, fmaf(w[r].w, x.w, s)));
        }
      }
    }
  }
  static_assert(kRowsPerWarp * kSamples == 32, "a warp's sums are one a lane");
  fold<16>(sum, lane);
  const int row = row0 + lane / kSamples, sample = sample0 + lane % kSamples;
  const bool any = row < d.rows && sample < d.samples;
  const float value = any && d.bias ? sum[0] + d.bias[row] : sum[0];
  if (d.part) return add_to_parts(d, value, any, block % d.row_blocks() * kRows, in[0]);
  if (!any) return;
  d.out[static_cast<int64_t>(sample) * d.rows + row] = d.mish_out ? math::mish(value) : value;
}

constexpr int kTableThreads = 128, kTableRows = 128, kTableSamples = 32, kTableColumns = 32;

// 8 elements of a row into a column each of `to`, whose columns are `pitch` apart.
template <class T>
__device__ __forceinline__ void load_column(const T* from, float* to, int pitch) {
  constexpr int kWidth = sizeof(T) == 4 ? 4 : 8;
#pragma unroll
  for (int i = 0; i < 8; i += kWidth) {
    const auto loaded = *reinterpret_cast<const Vector<T, kWidth>*>(from + i);
#pragma unroll
    for (int j = 0; j < kWidth; j++) to[(i + j) * pitch] = widen(loaded.data[j]);
  }
}

// Columns are a multiple of 32, rows of 4; no activations.
template <class Weight>
__global__ void __launch_bounds__(kTableThreads) table_kernel(const Dense d) {
  // Threads read 4 neighbours, and store to neighbours: the padding keeps both free of conflicts.
  constexpr int kPitch = kTableRows + 4, kInPitch = kTableSamples + 4;
  __shared__ __align__(16) float weights[kTableColumns][kPitch], in[kTableColumns][kInPitch];
  const int tid = threadIdx.x, row0 = blockIdx.x * kTableRows, sample0 = blockIdx.y * kTableSamples;
  const Weight* weight_row =
      static_cast<const Weight*>(d.weights) + static_cast<int64_t>(min(row0 + tid, d.rows - 1)) * d.columns;
  const int in_column = tid / kTableSamples * 8;
  const float* in_row =
      d.in + static_cast<int64_t>(min(sample0 + tid % kTableSamples, d.samples - 1)) * d.columns + in_column;
  const int row = tid % 16 * 4, sample = tid / 16 * 4;  // and the rows 64 further on
  float sum[4][8] = {};                                 // [sample][row]
  for (int column0 = 0; column0 < d.columns; column0 += kTableColumns) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTableColumns; i += 8) load_column(weight_row + column0 + i, &weights[i][tid], kPitch);
    load_column(in_row + column0, &in[in_column][tid % kTableSamples], kInPitch);
    __syncthreads();
#pragma unroll 8
    for (int c = 0; c < kTableColumns; c++) {
      const float4 low = *reinterpret_cast<const float4*>(&weights[c][row]),
                   high = *reinterpret_cast<const float4*>(&weights[c][row + 64]),
                   x = *reinterpret_cast<const float4*>(&in[c][sample]);
      const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, xs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int n = 0; n < 4; n++) {
#pragma unroll
        for (int r = 0; r < 8; r++) sum[n][r] = fmaf(w[r], xs[n], sum[n][r]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int first = row0 + row + half * 64;
    if (first >= d.rows) continue;
    float4 bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (d.bias) bias = *reinterpret_cast<const float4*>(d.bias + first);
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const float* s = sum[n] + half * 4;
      if (sample0 + sample + n < d.samples)
        *reinterpret_cast<float4*>(d.out + static_cast<int64_t>(sample0 + sample + n) * d.rows + first) =
            make_float4(s[0] + bias.x, s[1] + bias.y, s[2] + bias.z, s[3] + bias.w);
    }
  }
}

template <class Weight>
cudaError_t dense(const Dense& first, const Dense& second, cudaStream_t stream) {
  const bool fours = first.columns % 4 == 0;
  if (fours != (second.columns % 4 == 0) && second.rows) {  // sums do not depend on what a GEMM is launched with
    const cudaError_t error = dense<Weight>(first, {}, stream);
    return error == cudaSuccess ? dense<Weight>(second, {}, stream) : error;
  }
  const dim3 blocks(first.blocks() + second.blocks());
  const DensePair pair = {{first, second}};
  return fours ? launch(dense_kernel<Weight, true>, blocks, kThreads, stream, pair)
               : launch(dense_kernel<Weight, false>, blocks, kThreads, stream, pair);
}

template <class Weight>
cudaError_t table(const Dense& d, cudaStream_t stream) {
  // Few samples leave most of a tile empty.
  if (d.samples <= 2 * kSamples || d.columns % kTableColumns || d.rows % 4) return dense<Weight>(d, {}, stream);
  const dim3 grid((d.rows + kTableRows - 1) / kTableRows, (d.samples + kTableSamples - 1) / kTableSamples);
  return launch(table_kernel<Weight>, grid, kTableThreads, stream, d);
}

template <class Weight>
cudaError_t film_as(const Plan& plan, const Call& call, const FilmBuffers& b, cudaStream_t stream) {
  const int dim = plan.config.step_dim, count = call.per_sample_timesteps ? call.batch : call.steps;
  const bool joined = call.batch == 1 && b.cond;
  const auto* packed = static_cast<const uint8_t*>(call.packed);
  const auto* floats = reinterpret_cast<const float*>(packed + plan.floats);
  const auto bias = [&](int i) { return floats + plan.step_bias[i]; };
  Dense cond = {}, hidden = {}, embedding = {}, step = {};
  cond.weights = packed + plan.film_cond, cond.bias = floats + plan.film_bias, cond.in = call.global_cond;
  cond.samples = call.batch, cond.rows = plan.film_rows, cond.columns = plan.config.cond_dim;
  cond.mish_in = true, cond.out = b.cond;
  if (call.step_film) {
    if (joined) cond.out = b.step, cond.part = call.step_film, cond.parts = count;
    return dense<Weight>(cond, {}, stream);
  }
  hidden.weights = packed + plan.step_weights[0], hidden.bias = bias(0), hidden.timesteps = call.timesteps;
  hidden.samples = count, hidden.rows = 4 * dim, hidden.columns = dim;
  hidden.mish_out = true, hidden.out = b.hidden;
  embedding.weights = packed + plan.step_weights[1], embedding.bias = bias(1), embedding.in = b.hidden;
  embedding.samples = count, embedding.rows = dim, embedding.columns = 4 * dim;
  embedding.mish_out = true, embedding.out = b.embedding;
  step.weights = packed + plan.film_step, step.bias = joined ? b.cond : nullptr, step.in = b.embedding;
  step.samples = count, step.rows = plan.film_rows, step.columns = dim, step.out = b.step;
  cudaError_t error = dense<Weight>(hidden, b.cond ? cond : Dense{}, stream);
  if (error == cudaSuccess) error = dense<Weight>(embedding, {}, stream);
  return error == cudaSuccess ? table<Weight>(step, stream) : error;
}

}  // namespace

cudaError_t film(const Plan& plan, const Call& call, const FilmBuffers& buffers, cudaStream_t stream) {
  return dispatch_to_32_bits(dense_dtype(plan.dtype), [&](auto tag) {
    return film_as<typename decltype(tag)::type>(plan, call, buffers, stream);
  });
}

}  // namespace dpa::kernels::unet1d
