// FiLM out of the loop.
//
//   sinusoid_kernel  e_i = sin(t f_i), e_{D/2 + i} = cos(t f_i), f_i = exp(-i log(10000) / (D/2 - 1)); a thread an
//   element dense_kernel     out[n, r] = act(sum_c w[r, c] in[n, c] + b[r]); in float32, weights as packed
//                    A block owns 32 rows and 8 samples: the samples' inputs lie in shared memory, 512 columns at a
//                    time; a warp owns 4 rows and reads each weight once for the 8 samples, neighbouring lanes
//                    neighbouring columns.
// The work: four products that read their weights once for every 8 timesteps or samples.
#include "kernels/common/dtype.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/math/mish.h"
#include "kernels/unet1d/film.h"

namespace dpa::kernels::unet1d {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kRowsPerWarp = 4, kRows = kWarps * kRowsPerWarp, kSamples = 8,
              kColumns = 512;

struct Dense {
  const void* weights;
  const float* bias;  // or null
  const float* in;
  float* out;
  int samples, rows, columns;
  bool mish_in, mish_out;
};

__global__ void sinusoid_kernel(const float* timesteps, float* out, int count, int dim) {
  const int e = blockIdx.x * blockDim.x + threadIdx.x, half = dim / 2;
  if (e >= count * dim) return;
  const int i = e % dim, n = e / dim;
  const float rate = expf(static_cast<float>(i % half) * -(9.210340371976184f / static_cast<float>(half - 1)));
  const float angle = timesteps[n] * rate;
  out[e] = i < half ? sinf(angle) : cosf(angle);
}

template <class Weight>
__global__ void __launch_bounds__(kThreads) dense_kernel(const Dense d) {
  __shared__ float in[kSamples][kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sample0 = blockIdx.y * kSamples;
  const int row0 = blockIdx.x * kRows + warp * kRowsPerWarp;
  const Weight* weights = static_cast<const Weight*>(d.weights);
  float sum[kRowsPerWarp][kSamples] = {};
  for (int column0 = 0; column0 < d.columns; column0 += kColumns) {
    const int columns = min(kColumns, d.columns - column0);
    __syncthreads();
    for (int e = threadIdx.x; e < kSamples * kColumns; e += kThreads) {
      const int n = e / kColumns, c = e % kColumns;
      float value = 0.0f;
      if (c < columns && sample0 + n < d.samples)
        value = d.in[static_cast<int64_t>(sample0 + n) * d.columns + column0 + c];
      in[n][c] = d.mish_in ? math::mish(value) : value;
    }
    __syncthreads();
#pragma unroll 4
    for (int c = lane; c < columns; c += 32) {
      float w[kRowsPerWarp];
#pragma unroll
      for (int r = 0; r < kRowsPerWarp; r++) {
        w[r] = row0 + r < d.rows ? widen(weights[static_cast<int64_t>(row0 + r) * d.columns + column0 + c]) : 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kSamples; n++) {
#pragma unroll
        for (int r = 0; r < kRowsPerWarp; r++) sum[r][n] = fmaf(w[r], in[n][c], sum[r][n]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsPerWarp; r++) {
#pragma unroll
    for (int n = 0; n < kSamples; n++) {
      float value = sum[r][n];
#pragma unroll
      for (int m = 16; m; m >>= 1) value += __shfl_xor_sync(~0u, value, m);
      if (lane == 0 && row0 + r < d.rows && sample0 + n < d.samples) {
        if (d.bias) value += d.bias[row0 + r];
        d.out[static_cast<int64_t>(sample0 + n) * d.rows + row0 + r] = d.mish_out ? math::mish(value) : value;
      }
    }
  }
}

template <class Weight>
cudaError_t dense(const Dense& d, cudaStream_t stream) {
  if (d.samples == 0 || d.rows == 0) return cudaSuccess;
  const dim3 grid((d.rows + kRows - 1) / kRows, (d.samples + kSamples - 1) / kSamples);
  dense_kernel<Weight><<<grid, kThreads, 0, stream>>>(d);
  return cudaGetLastError();
}

template <class Weight>
cudaError_t film_as(const Plan& plan, const Call& call, const FilmBuffers& b, cudaStream_t stream) {
  const int dim = plan.config.step_dim, count = call.per_sample_timesteps ? call.batch : call.steps;
  const auto* packed = static_cast<const uint8_t*>(call.packed);
  const auto* floats = reinterpret_cast<const float*>(packed + plan.floats);
  cudaError_t error = launch(sinusoid_kernel, grid_for(static_cast<int64_t>(count) * dim, kThreads), kThreads, stream,
                             call.timesteps, b.sinusoid, count, dim);
  if (error != cudaSuccess) return error;
  const Dense products[4] = {
      {packed + plan.step_weights[0], floats + plan.step_bias[0], b.sinusoid, b.hidden, count, 4 * dim, dim, false,
       true},
      {packed + plan.step_weights[1], floats + plan.step_bias[1], b.hidden, b.embedding, count, dim, 4 * dim, false,
       true},
      {packed + plan.film_cond, floats + plan.film_bias, call.global_cond, b.cond, call.batch, plan.film_rows,
       plan.config.cond_dim, true, false},
      {packed + plan.film_step, call.batch == 1 ? b.cond : nullptr, b.embedding, b.step, count, plan.film_rows, dim,
       false, false},
  };
  for (const Dense& product : products) {
    error = dense<Weight>(product, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t film(const Plan& plan, const Call& call, const FilmBuffers& buffers, cudaStream_t stream) {
  switch (dense_dtype(plan.dtype)) {
    case DType::kFloat32: return film_as<float>(plan, call, buffers, stream);
    case DType::kFloat16: return film_as<__half>(plan, call, buffers, stream);
    case DType::kBFloat16: return film_as<__nv_bfloat16>(plan, call, buffers, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace dpa::kernels::unet1d
