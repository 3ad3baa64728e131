// What a block of the resident kernel for any number of samples makes of a group's raw values, for all samples:
// normalised, activated, modulated. A thread owns the same channel pair of every time it takes.
#pragma once
#include "kernels/cuda/unet1d/resident_block.cuh"

namespace dpa::kernels::unet1d {

template <class Weight>
struct GeneralValues : Block<Weight> {
  using Base = Block<Weight>;
  using Base::a, Base::shared, Base::tid, Base::warp, Base::lane, Base::k, Base::step;

  // What a thread's channel pair needs of a layer to finish its output. Fetched before the messages are
  // waited for.
  struct Parameters {
    float2 bias, other_bias, gamma, beta, scale_step, scale_cond, shift_step, shift_cond;
  };
  __device__ __forceinline__ void fetch(Parameters& p, int bias, int other_bias, int norm, int film,
                                        int channels) const {
    const int width = channels / kSlicesIn, c = k * width + (tid & (width / 2 - 1)) * 2;
    p.bias = ptx::load_constant_2(a.floats + bias + c);
    p.other_bias = ptx::load_constant_2(a.floats + other_bias + c);
    if (norm >= 0) {
      p.gamma = ptx::load_constant_2(a.floats + norm + c);
      p.beta = ptx::load_constant_2(a.floats + norm + channels + c);
    }
    if (film >= 0) fetch_film(p, film + c, channels, 0);
  }
  __device__ __forceinline__ void fetch_film(Parameters& p, int at, int channels, int b) const {
    const float* of_step = a.film_step + step * a.film_step_stride + b * a.film_sample_stride + at;
    const float* of_cond = a.film_cond + static_cast<int64_t>(b) * a.film_rows + at;
    const int shift = a.film_scale ? channels : 0;
    p.scale_step = ptx::load_constant_2(of_step);
    p.shift_step = ptx::load_constant_2(of_step + shift);
    if (a.film_cond == nullptr) return;
    p.scale_cond = ptx::load_constant_2(of_cond);
    p.shift_cond = ptx::load_constant_2(of_cond + shift);
  }

  // Normalise, activate, modulate: a raw pair with its bias to a value.
  struct Moments {
    float mean, inverse;
  };
  __device__ __forceinline__ float2 modulate(const Parameters& p, bool norm, bool film, Moments moments,
                                             float2 v) const {
    if (norm) {
      v.x = Base::activate(fmaf((v.x - moments.mean) * moments.inverse, p.gamma.x, p.beta.x));
      v.y = Base::activate(fmaf((v.y - moments.mean) * moments.inverse, p.gamma.y, p.beta.y));
    }
    if (film) {
      if (a.film_scale) v.x *= p.scale_step.x + p.scale_cond.x, v.y *= p.scale_step.y + p.scale_cond.y;
      v.x += p.shift_step.x + p.shift_cond.x, v.y += p.shift_step.y + p.shift_cond.y;
    }
    return v;
  }
  // One warp's share of a sample's moments: `pairs` pairs around `pivot`. Lane 0 stores mean and sum of squared
  // distances.
  __device__ __forceinline__ void store_moments(float2* to, float sum, float squares, float pivot,
                                                float inverse_count) const {
#pragma unroll
    for (int i = 16; i; i >>= 1) {
      sum += __shfl_xor_sync(~0u, sum, i);
      squares += __shfl_xor_sync(~0u, squares, i);
    }
    const float mean = sum * inverse_count;
    if (lane == 0) *to = make_float2(pivot + mean, fmaxf(squares - sum * mean, 0.0f));
  }
  // A sample's moments from its warps'; warp w holds counts(w) values.
  template <class Counts>
  __device__ __forceinline__ Moments combine_moments(const float2* from, float inverse_total, Counts counts) const {
    float2 part[kConsumerWarps];
    float weighted[kConsumerWarps], n[kConsumerWarps];
#pragma unroll
    for (int w = 0; w < kConsumerWarps; w += 2) {
      const float4 two = *reinterpret_cast<const float4*>(from + w);
      part[w] = make_float2(two.x, two.y), part[w + 1] = make_float2(two.z, two.w);
    }
#pragma unroll
    for (int w = 0; w < kConsumerWarps; w++) n[w] = counts(w), weighted[w] = n[w] * part[w].x;
    const float mean = sum_of(weighted) * inverse_total;
#pragma unroll
    for (int w = 0; w < kConsumerWarps; w++) {
      const float d = part[w].x - mean;
      weighted[w] = fmaf(n[w] * d, d, part[w].y);
    }
    return {mean, rsqrtf(sum_of(weighted) * inverse_total + 1e-5f)};
  }
  // A group's raw values become values, for all samples: get(b, t, c, unit) gives a raw pair with its bias, put(b, t,
  // c, unit, pair) takes the value; c is within the group, and a unit is the same thread's wherever times and width are
  // the same.
  template <class Get, class Put>
  __device__ __forceinline__ void epilogue(Parameters& p, bool norm, int film, int all_channels, int width, int times,
                                           Get get, Put put) {
    const int half_log2 = 30 - __clz(width), pairs = times << half_log2, c = (tid & ((1 << half_log2) - 1)) * 2;
    float2* sums = reinterpret_cast<float2*>(shared + a.layout.sums);
    const float inverse_total = 0.5f / static_cast<float>(pairs);
    const int chunks = (pairs + kThreads - 1) / kThreads;
    float2* stash = reinterpret_cast<float2*>(shared + a.layout.stash);
    auto counts = [&](int w) {
      int n = 0;
      for (int chunk = 0; chunk < chunks; chunk++) n += 2 * max(0, min(32, pairs - chunk * kThreads - w * 32));
      return static_cast<float>(n);
    };
    for (int b = 0; b < a.batch; b++) {
      float sum = 0.0f, squares = 0.0f, pivot = 0.0f;
      for (int chunk = 0; chunk < chunks; chunk++) {
        const int u = chunk * kThreads + tid, unit = (b * chunks + chunk) * kThreads + tid;
        const float2 v = u < pairs ? get(b, u >> half_log2, c, unit) : make_float2(0.0f, 0.0f);
        stash[unit] = v;
        if (norm) {
          if (chunk == 0) pivot = __shfl_sync(~0u, v.x, 0);
          const float x = u < pairs ? v.x - pivot : 0.0f, y = u < pairs ? v.y - pivot : 0.0f;
          sum += x + y;
          squares = fmaf(x, x, fmaf(y, y, squares));
        }
      }
      const float n = counts(warp);
      if (norm) store_moments(sums + b * kConsumerWarps + warp, sum, squares, pivot, n > 0.0f ? 1.0f / n : 0.0f);
    }
    if (norm) sync_consumers();
    for (int b = 0; b < a.batch; b++) {
      const Moments moments = norm ? combine_moments(sums + b * kConsumerWarps, inverse_total, counts) : Moments{};
      if (b > 0 && film >= 0) fetch_film(p, film + k * width + c, all_channels, b);
      for (int chunk = 0; chunk < chunks; chunk++) {
        const int u = chunk * kThreads + tid, unit = (b * chunks + chunk) * kThreads + tid;
        if (u < pairs) put(b, u >> half_log2, c, unit, modulate(p, norm, film >= 0, moments, stash[unit]));
      }
    }
  }
};

}  // namespace dpa::kernels::unet1d
