// What a tile's normalisation needs: its statistics, the parameters of norm and FiLM, the biases of its outputs.
#pragma once
#include "kernels/cuda/unet1d/phases.h"
#include "kernels/cuda/unet1d/phases_operands.cuh"

namespace dpa::kernels::unet1d::device {

constexpr int kThreads = kPhaseWarps * 32;

// Sums of (sample, group) pairs about their first value: float4 (sum, sum of squares, first value, -), `parts` a pair.
// A warp owns a part.
DPA_DEVICE void statistics(const Work& w, const float* stash, int pitch, float4* to) {
  const int groups = w.groups, pairs = w.samples * groups, parts = w.parts;
  const int width = w.p.group_channels, counted = w.p.counted, count = counted * w.p.times_in, lane = thread() & 31;
  for (int i = thread() >> 5; i < pairs * parts; i += kPhaseWarps) {
    const int pair = w.by_parts(i), b = w.by_groups(pair);
    const float* from = stash + b * w.p.times_in * pitch + (pair - b * groups) * width;
    const float first = from[0];
    float sum = 0.0f, squares = 0.0f;
#pragma unroll 4
    for (int e = (i - pair * parts) * 32 + lane; e < count; e += parts * 32) {
      const int row = counted == 1 ? e : static_cast<int>(high_product(e, w.p.counted_magic));
      const float d = from[row * pitch + e - row * counted] - first;
      sum += d, squares += d * d;
    }
#pragma unroll
    for (int m = 16; m; m >>= 1) sum += shuffle_xor(sum, m), squares += shuffle_xor(squares, m);
    if (lane == 0) to[i] = make_float4(sum, squares, first, 0.0f);
  }
}

// Norm and FiLM parameters in shared memory: (sample, kind, channel) with the kinds factor and term of the norm, scale
// and shift of the FiLM; behind them gamma and beta by channel.
struct Film {
  float scale = 1.0f, shift = 0.0f, more_scale = 0.0f, more_shift = 0.0f;  // of the step, of the sample: not added, for
                                                                           // that would wait for the loads
  DPA_DEVICE float2 sums() const { return make_float2(scale + more_scale, shift + more_shift); }
};
DPA_DEVICE Film film_of(const PhaseLoop& a, const Phase& p, int step, int sample, int channel) {
  Film f;
  if (p.film < 0) return f;
  const int at = p.film + channel, shift_at = a.film_scale ? at + p.channels_in : at;
  const float* row = a.film_step + step * a.film_step_stride + sample * a.film_sample_stride;
  f.shift = row[shift_at];
  if (a.film_scale) f.scale = row[at];
  if (a.film_cond) {
    const float* more = a.film_cond + static_cast<int64_t>(sample) * a.film_rows;
    f.more_shift = more[shift_at];
    if (a.film_scale) f.more_scale = more[at];
  }
  return f;
}
// A thread's first channel (of sample 0) and first output channel, fetched before the input is waited for.
struct Early {
  float gamma = 0.0f, beta = 0.0f;
  Film film = {0.0f, 0.0f, 0.0f, 0.0f};
  float bias[2], scale[2];
};
template <class Tile>
DPA_DEVICE float2 bias_of(const PhaseLoop& a, const Work& w, int segment, int i) {
  const int row = w.first_tile * 16 + i;
  float2 r = make_float2(0.0f, 0.0f);
  if (row >= w.p.channels_out) return r;
  if (w.at.in == 0) r.x = a.floats[w.p.segments[segment].bias + row];
  if constexpr (Tile::kScaled) r.y = a.floats[w.p.segments[segment].scale + row];
  return r;
}
template <class Tile>
DPA_DEVICE void fetch_early(const PhaseLoop& a, const Work& w, int step, Early& e) {
  const int i = thread();
  if (w.p.norm >= 0 && i < w.real_channels) {
    const int c = w.first_channel + i;
    e.gamma = a.floats[w.p.norm + c], e.beta = a.floats[w.p.norm + w.p.channels_in + c];
    e.film = film_of(a, w.p, step, w.sample0, c);
  }
#pragma unroll
  for (int s = 0; s < 2; s++) {
    if (s >= w.p.num_segments || i >= w.row_tiles * 16) continue;
    const float2 b = bias_of<Tile>(a, w, s, i);
    e.bias[s] = b.x, e.scale[s] = b.y;
  }
}
// Stores what fetch_early brought, and fetches what it left: further channels and samples.
template <class Tile>
DPA_DEVICE void store_early(const PhaseLoop& a, const Work& w, int step, const Early& e, float* to, float* bias) {
  const int n = w.value_channels, samples = w.samples, count = w.row_tiles * 16;
  if (w.p.norm >= 0) {
    float *gamma = to + 4 * samples * n, *beta = gamma + n;
    const int i = thread();
    const float2 own = e.film.sums();
    if (i < n) gamma[i] = e.gamma, beta[i] = e.beta, to[2 * n + i] = own.x, to[3 * n + i] = own.y;
#pragma unroll 1
    for (int j = i + kThreads; j < samples * n; j += kThreads) {
      const int b = w.by_value(j), c = j - b * n, channel = w.first_channel + c;
      const bool real = c < w.real_channels;
      if (b == 0) {
        gamma[c] = real ? a.floats[w.p.norm + channel] : 0.0f;
        beta[c] = real ? a.floats[w.p.norm + w.p.channels_in + channel] : 0.0f;
      }
      const float2 film = real ? film_of(a, w.p, step, w.sample0 + b, channel).sums() : make_float2(0.0f, 0.0f);
      to[(4 * b + 2) * n + c] = film.x, to[(4 * b + 3) * n + c] = film.y;
    }
    // what lies between a short first sample and thread 256 belongs to the samples after it
    if (i >= n && i < samples * n) {
      const int b = w.by_value(i), c = i - b * n;
      const bool real = c < w.real_channels;
      const float2 film =
          real ? film_of(a, w.p, step, w.sample0 + b, w.first_channel + c).sums() : make_float2(0.0f, 0.0f);
      to[(4 * b + 2) * n + c] = film.x, to[(4 * b + 3) * n + c] = film.y;
    }
  }
#pragma unroll
  for (int s = 0; s < 2; s++) {
    if (s >= w.p.num_segments) continue;
    for (int i = thread(); i < count; i += kThreads) {
      const float2 b = i < kThreads ? make_float2(e.bias[s], e.scale[s]) : bias_of<Tile>(a, w, s, i);
      bias[2 * s * count + i] = b.x;
      if constexpr (Tile::kScaled) bias[(2 * s + 1) * count + i] = b.y * kWidenedE4m3;
    }
  }
}

// The norm as x * factor + term, by sample and channel.
DPA_DEVICE void make_factors(const Work& w, const float4* statistics, float* to) {
  const int n = w.value_channels, parts = w.parts;
  const float *gamma = to + 4 * w.samples * n, *beta = gamma + n;
#pragma unroll 1
  for (int i = thread(); i < w.samples * n; i += kThreads) {
    const int b = w.by_value(i), c = i - b * n, width = w.p.group_channels;
    const int group = width == 1 ? c : static_cast<int>(high_product(c, w.p.group_magic));
    float factor = 0.0f, term = 0.0f;
    if (group < w.groups) {
      const float4* from = statistics + (b * w.groups + group) * parts;
      float sum = 0.0f, squares = 0.0f;
#pragma unroll
      for (int k = 0; k < kPhaseWarps; k++) {
        if (k < parts) sum += from[k].x, squares += from[k].y;
      }
      const float shift = sum * w.inverse_count, variance = squares * w.inverse_count - shift * shift;
      factor = inverse_root((variance > 0.0f ? variance : 0.0f) + 1e-5f) * gamma[c];
      term = beta[c] - (from[0].z + shift) * factor;
    }
    to[4 * b * n + c] = factor, to[(4 * b + 1) * n + c] = term;
  }
}

}  // namespace dpa::kernels::unet1d::device
