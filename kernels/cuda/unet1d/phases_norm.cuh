// What a tile's normalisation needs: its statistics, the parameters of norm and FiLM, the biases of its outputs.
#pragma once
#include "kernels/cuda/unet1d/phases.h"
#include "kernels/cuda/unet1d/phases_operands.cuh"

namespace dpa::kernels::unet1d::device {

constexpr int kThreads = kPhaseWarps * 32;

// Mean and inverse deviation, of sums about a value.
DPA_DEVICE float4 moments_of(float sum, float squares, float first, float inverse_count) {
  const float shift = sum * inverse_count, variance = squares * inverse_count - shift * shift;
  return make_float4(first + shift, inverse_root((variance > 0.0f ? variance : 0.0f) + 1e-5f), 0.0f, 0.0f);
}

// Sums of (sample, group) pairs about their first value: float4 (sum, sum of squares, first value, -), `parts` a pair.
// A warp owns a part; a lane adds kVector channels of a row at a time. Of a pair with one part, its moments.
template <int kVector>
DPA_DEVICE void statistics(const Work& w, const float* stash, int pitch, float4* to) {
  const Divisor by_parts = w.by_parts, by_groups = w.by_groups;
  const uint32_t magic = w.p.counted_magic;
  const int groups = w.groups, parts = w.parts, all = w.samples * groups * parts, times = w.p.times_in,
            width = w.p.group_channels, counted = w.p.counted, count = counted * times, lane = thread() & 31;
  const float inverse_count = w.inverse_count;
  for (int i = thread() >> 5; i < all; i += kPhaseWarps) {
    const int pair = by_parts(i), b = by_groups(pair);
    const float* from = stash + b * times * pitch + (pair - b * groups) * width;
    const float first = from[0];
    float sum = 0.0f, squares = 0.0f;
#pragma unroll 4
    for (int e = ((i - pair * parts) * 32 + lane) * kVector; e < count; e += parts * 32 * kVector) {
      const int row = counted == 1 ? e : static_cast<int>(high_product(e, magic));
      const float* at = from + row * (pitch - counted) + e;
      if constexpr (kVector == 4) {
        const float4 v = *reinterpret_cast<const float4*>(at);
        const float x = v.x - first, y = v.y - first, z = v.z - first, u = v.w - first;
        sum += (x + y) + (z + u), squares += (x * x + y * y) + (z * z + u * u);
      } else {
        const float d = *at - first;
        sum += d, squares += d * d;
      }
    }
#pragma unroll
    for (int m = 16; m; m >>= 1) sum += shuffle_xor(sum, m), squares += shuffle_xor(squares, m);
    if (lane > 0) continue;
    to[i] = make_float4(sum, squares, first, 0.0f);
    if (parts == 1) to[i] = moments_of(sum, squares, first, inverse_count);
  }
}
DPA_DEVICE void statistics(const Work& w, const float* stash, int pitch, float4* to) {
  if (w.p.counted % 4 == 0 && w.p.group_channels % 4 == 0)
    statistics<4>(w, stash, pitch, to);
  else
    statistics<1>(w, stash, pitch, to);
}

// Norm and FiLM parameters in shared memory: (sample, kind, channel) with the kinds factor and term of the norm, scale
// and shift of the FiLM; behind them gamma and beta by channel.
struct Film {
  float scale = 1.0f, shift = 0.0f, more_scale = 0.0f, more_shift = 0.0f;  // of the step, of the sample: not added, for
                                                                           // that would wait for the loads
  DPA_DEVICE float2 sums() const { return make_float2(scale + more_scale, shift + more_shift); }
};
DPA_DEVICE Film film_of(const PhaseLoop& a, int film, int channels, int step, int sample, int channel) {
  Film f;
  if (film < 0) return f;
  const int at = film + channel, shift_at = a.film_scale ? at + channels : at;
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
// The bias of an output channel, which the first slice of the input adds, and its scale.
struct BiasOf {
  int first, channels, slice, bias, scale;
  DPA_DEVICE BiasOf(const Work& w, int segment)
      : first(loaded(w.first_tile) * 16),
        channels(loaded(w.p.channels_out)),
        slice(loaded(w.at.in)),
        bias(loaded(w.p.segments[segment].bias)),
        scale(loaded(w.p.segments[segment].scale)) {}
  template <class Tile>
  DPA_DEVICE float2 at(const PhaseLoop& a, int i) const {
    float2 r = make_float2(0.0f, 0.0f);
    if (first + i >= channels) return r;
    if (slice == 0) r.x = a.floats[bias + first + i];
    if constexpr (Tile::kScaled) r.y = a.floats[scale + first + i];
    return r;
  }
};
template <class Tile>
DPA_DEVICE void fetch_early(const PhaseLoop& a, const Work& w, int step, Early& e) {
  const int i = thread(), norm = loaded(w.p.norm), real_channels = loaded(w.real_channels),
            first_channel = loaded(w.first_channel), channels = loaded(w.p.channels_in), film = loaded(w.p.film),
            sample0 = loaded(w.sample0), segments = loaded(w.p.num_segments), rows = loaded(w.row_tiles) * 16;
  const BiasOf bias[2] = {{w, 0}, {w, 1}};
  if (norm >= 0 && i < real_channels) {
    const int c = first_channel + i;
    e.gamma = a.floats[norm + c], e.beta = a.floats[norm + channels + c];
    e.film = film_of(a, film, channels, step, sample0, c);
  }
#pragma unroll
  for (int s = 0; s < 2; s++) {
    if (s >= segments || i >= rows) continue;
    const float2 b = bias[s].template at<Tile>(a, i);
    e.bias[s] = b.x, e.scale[s] = b.y;
  }
}
// Stores what fetch_early brought, and fetches what it left: further channels and samples.
template <class Tile>
DPA_DEVICE void store_early(const PhaseLoop& a, const Work& w, int step, const Early& e, float* to, float* bias) {
  const int n = loaded(w.value_channels), samples = loaded(w.samples), count = loaded(w.row_tiles) * 16,
            norm = loaded(w.p.norm), segments = loaded(w.p.num_segments);
  if (norm >= 0) {
    const Divisor by_value = w.by_value;
    const int channels = w.p.channels_in, first_channel = w.first_channel, real_channels = w.real_channels,
              film = w.p.film, sample0 = w.sample0;
    float *gamma = to + 4 * samples * n, *beta = gamma + n;
    const int i = thread();
    const float2 own = e.film.sums();
    const auto store_film = [&](int b, int c) {
      const float2 sums = c < real_channels ? film_of(a, film, channels, step, sample0 + b, first_channel + c).sums()
                                            : make_float2(0.0f, 0.0f);
      to[(4 * b + 2) * n + c] = sums.x, to[(4 * b + 3) * n + c] = sums.y;
    };
    if (i < n) gamma[i] = e.gamma, beta[i] = e.beta, to[2 * n + i] = own.x, to[3 * n + i] = own.y;
#pragma unroll 1
    for (int j = i + kThreads; j < samples * n; j += kThreads) {
      const int b = by_value(j), c = j - b * n, channel = first_channel + c;
      if (b == 0) {
        gamma[c] = c < real_channels ? a.floats[norm + channel] : 0.0f;
        beta[c] = c < real_channels ? a.floats[norm + channels + channel] : 0.0f;
      }
      store_film(b, c);
    }
    // what lies between a short first sample and thread 256 belongs to the samples after it
    if (i >= n && i < samples * n) {
      const int b = by_value(i);
      store_film(b, i - b * n);
    }
  }
#pragma unroll
  for (int s = 0; s < 2; s++) {
    if (s >= segments) continue;
    for (int i = thread(); i < count; i += kThreads) {
      const float2 b = i < kThreads ? make_float2(e.bias[s], e.scale[s]) : BiasOf(w, s).template at<Tile>(a, i);
      bias[2 * s * count + i] = b.x;
      if constexpr (Tile::kScaled) bias[(2 * s + 1) * count + i] = b.y * kWidenedE4m3;
    }
  }
}

// The norm as x * factor + term, by sample and channel.
DPA_DEVICE void make_factors(const Work& w, const float4* statistics, float* to) {
  const Divisor by_value = w.by_value;
  const uint32_t magic = w.p.group_magic;
  const int n = w.value_channels, parts = w.parts, groups = w.groups, count = w.samples * n, width = w.p.group_channels;
  const float inverse_count = w.inverse_count, *gamma = to + 4 * count, *beta = gamma + n;
#pragma unroll 1
  for (int i = thread(); i < count; i += kThreads) {
    const int b = by_value(i), c = i - b * n;
    const int group = width == 1 ? c : static_cast<int>(high_product(c, magic));
    float factor = 0.0f, term = 0.0f;
    if (group < groups) {
      const float4* from = statistics + (b * groups + group) * parts;
      float4 moments = from[0];
      if (parts > 1) {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int k = 0; k < kPhaseWarps; k++) {
          if (k < parts) sum += from[k].x, squares += from[k].y;
        }
        moments = moments_of(sum, squares, from[0].z, inverse_count);
      }
      factor = moments.y * gamma[c], term = beta[c] - moments.x * factor;
    }
    to[4 * b * n + c] = factor, to[(4 * b + 1) * n + c] = term;
  }
}

}  // namespace dpa::kernels::unet1d::device
