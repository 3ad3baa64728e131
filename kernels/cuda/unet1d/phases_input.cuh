// The input of a tile: partial sums and kept values are polled, added, normalised and written to the slab, the operand
// of the GEMM: (sample, time, channel) with times of zeros around and between samples, value channels first, then those
// of the skip connection.
#pragma once
#include "kernels/cuda/unet1d/phases_norm.cuh"
#include "kernels/math/mish.h"

namespace dpa::kernels::unet1d::device {

// Polling. In a test's build with an end: a wait of about a second marks the workspace, and from then on nothing waits.
struct Watch {
  uint32_t* stuck;
  bool gave_up = false;
  DPA_DEVICE bool again([[maybe_unused]] int& polls) {
#ifdef DPA_TEST_POLLS
    if (gave_up) return false;
    if ((++polls & 255) == 0 && (polls > 400000 || load_message_word(stuck))) {
      store_message_word(stuck, 1);
      gave_up = true;
    }
#endif
#ifdef DPA_EMULATE
    pause();
#endif
    return !gave_up;
  }
};

// Pairs (row, column) of a table of `columns`, 256 apart.
struct Walk {
  int row, column, row_step, column_step, columns;
  DPA_DEVICE Walk(int first, const Divisor& n) : columns(n.by) {
    row = n(first), column = first - row * columns;
    row_step = n(kThreads), column_step = kThreads - row_step * columns;
  }
  DPA_DEVICE void next() {
    row += row_step, column += column_step;
    if (column >= columns) column -= columns, row++;
  }
};

// A source of the tile's slice: its words, and where the values go in shared memory.
struct Sums {
  const uint32_t* words;
  int partial_stride, column_stride;
  float* to;
  int pitch;
};
// Kept floats (to null: none) that are fetched beside them, with the same rows and channels.
struct Kept {
  const uint32_t* words;
  int stride;
  float* to;
  int pitch;
};
// Whether words lack the flag. All loads of a poll are under way before the first of them is waited for only if what
// they brought is checked in the order of the last load to the first: otherwise the compiler may put a check between
// loads.
struct Missing {
  uint4 any = make_uint4(0, 0, 0, 0);
  DPA_DEVICE void check(const uint4& v, uint32_t flag) {
    any.x = or_xor(any.x, v.x, flag), any.y = or_xor(any.y, v.y, flag);
    any.z = or_xor(any.z, v.z, flag), any.w = or_xor(any.w, v.w, flag);
  }
  DPA_DEVICE bool some() const { return ((any.x | any.y) | (any.z | any.w)) & 1; }
};
// Messages of 16 bytes, until all of their words have the flag.
template <int kItems>
DPA_DEVICE void poll(const uint32_t* const (&from)[kItems], uint4 (&v)[kItems], uint32_t flag, Watch& watch) {
  Missing missing;
  int polls = 0;
  do {
    missing = {};
#pragma unroll
    for (int i = 0; i < kItems; i++) v[i] = load_message_16(from[i]);
#pragma unroll
    for (int i = kItems - 1; i >= 0; i--) missing.check(v[i], flag);
  } while (missing.some() && watch.again(polls));
}
// A word, until it has the flag; without it.
DPA_DEVICE uint32_t poll_word(const uint32_t* from, uint32_t flag, Watch& watch) {
  uint32_t v;
  int polls = 0;
  while (((v = load_message_word(from)) ^ flag) & 1) {
    if (!watch.again(polls)) break;
  }
  return v & ~1u;
}
DPA_DEVICE float4 floats_of(const uint4& v) {
  return make_float4(as_float(v.x & ~1u), as_float(v.y & ~1u), as_float(v.z & ~1u), as_float(v.w & ~1u));
}

// Sums of kPartials partial sums, and kept floats. kFloats: an item is 4 channels in 16 bytes, otherwise 8: a word is
// channels g and g + 8 of 16. All loads of an item are in flight together.
template <class Math, bool kFloats, int kPartials>
DPA_DEVICE void load_sums(const Sums& s, const Kept& residual, const Kept& skip, int rows, const Divisor& by,
                          uint32_t flag, Watch& watch) {
  constexpr int kItems = kPartials >= 4 ? 1 : 2, kQuads = kFloats ? 1 : 2;
  Walk walk(thread(), by);
#pragma unroll 1
  while (walk.row < rows) {
    int row[kItems], channel[kItems];
    const uint32_t *from[kItems], *beside[2][kItems];
    uint4 v[kItems][kPartials], kept[kItems][2][kQuads];
    bool inside[kItems];
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      inside[i] = walk.row < rows, row[i] = walk.row;
      const int column = walk.column;
      channel[i] = kFloats ? column * 4 : (column >> 1) * 16 + (column & 1) * 4;
      from[i] = inside[i] ? s.words + (row[i] * s.column_stride + column * 4) : from[0];
      beside[0][i] = inside[i] ? residual.words + (row[i] * residual.stride + channel[i]) : beside[0][0];
      beside[1][i] = inside[i] ? skip.words + (row[i] * skip.stride + channel[i]) : beside[1][0];
#pragma unroll
      for (int h = 0; h < kQuads; h++) kept[i][0][h] = kept[i][1][h] = make_uint4(flag, flag, flag, flag);
      walk.next();
    }
    Missing missing;
    int polls = 0;
    do {
      missing = {};
#pragma unroll
      for (int i = 0; i < kItems; i++) {
#pragma unroll
        for (int k = 0; k < kPartials; k++) v[i][k] = load_message_16(from[i] + k * s.partial_stride);
      }
      if (residual.to) {
#pragma unroll
        for (int i = 0; i < kItems; i++)
#pragma unroll
          for (int h = 0; h < kQuads; h++) kept[i][0][h] = load_message_16(beside[0][i] + h * 8);
      }
      if (skip.to) {
#pragma unroll
        for (int i = 0; i < kItems; i++)
#pragma unroll
          for (int h = 0; h < kQuads; h++) kept[i][1][h] = load_message_16(beside[1][i] + h * 8);
      }
#pragma unroll
      for (int from_skip = 1; from_skip >= 0; from_skip--)
#pragma unroll
        for (int i = kItems - 1; i >= 0; i--)
#pragma unroll
          for (int h = kQuads - 1; h >= 0; h--) missing.check(kept[i][from_skip][h], flag);
#pragma unroll
      for (int i = kItems - 1; i >= 0; i--)
#pragma unroll
        for (int k = kPartials - 1; k >= 0; k--) missing.check(v[i][k], flag);
    } while (missing.some() && watch.again(polls));
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      float low[4] = {}, high[4] = {};
#pragma unroll
      for (int k = 0; k < kPartials; k++) {
        const uint32_t w[4] = {v[i][k].x & ~1u, v[i][k].y & ~1u, v[i][k].z & ~1u, v[i][k].w & ~1u};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          if constexpr (kFloats) {
            low[j] += as_float(w[j]);
          } else {
            const float2 two = unpack(Math{}, w[j]);
            low[j] += two.x, high[j] += two.y;
          }
        }
      }
      if (!inside[i]) continue;
      float* to = s.to + row[i] * s.pitch + channel[i];
      *reinterpret_cast<float4*>(to) = make_float4(low[0], low[1], low[2], low[3]);
      if constexpr (!kFloats) *reinterpret_cast<float4*>(to + 8) = make_float4(high[0], high[1], high[2], high[3]);
#pragma unroll
      for (int h = 0; h < kQuads; h++) {
        if (residual.to)
          *reinterpret_cast<float4*>(residual.to + row[i] * residual.pitch + channel[i] + h * 8) =
              floats_of(kept[i][0][h]);
        if (skip.to)
          *reinterpret_cast<float4*>(skip.to + row[i] * skip.pitch + channel[i] + h * 8) = floats_of(kept[i][1][h]);
      }
    }
  }
}

// Partial sums by their number; or, with words null, the kept floats alone (a phase whose value is the head's has none).
template <class Tile>
DPA_DEVICE void load_source(const Work& w, int partials, const Sums& s, const Kept& residual, const Kept& skip,
                            uint32_t flag, Watch& watch) {
  using Math = typename Tile::Math;
  const Divisor& by = Tile::kWide ? w.by_floats : w.by_chunks;
  if (partials == 8)
    load_sums<Math, Tile::kWide, 8>(s, residual, skip, w.rows, by, flag, watch);
  else if (partials == 4)
    load_sums<Math, Tile::kWide, 4>(s, residual, skip, w.rows, by, flag, watch);
  else if (partials == 2)
    load_sums<Math, Tile::kWide, 2>(s, residual, skip, w.rows, by, flag, watch);
  else
    load_sums<Math, Tile::kWide, 1>(s, residual, skip, w.rows, by, flag, watch);
}

// What the loop begins with: inpainted values where the mask is set.
DPA_DEVICE float initial_at(const PhaseLoop& a, int at) {
  return a.condition_mask && a.condition_mask[at] ? a.condition_data[at] : a.initial[at];
}
// The sample with zeros around it, (sample, taps / 2 + time + taps / 2, action). A barrier is due before it is read.
DPA_DEVICE void load_sample(const PhaseLoop& a, const Work& w, int step, uint32_t flag, float* to, Watch& watch) {
  const int halo = a.taps / 2, times = a.horizon + 2 * halo, count = w.samples * times * a.actions;
  for (int i = thread(); i < count; i += kThreads) {
    const int row = divide(i, a.actions), action = i - row * a.actions, b = divide(row, times);
    const int time = row - b * times - halo, sample = w.sample0 + b;
    float x = 0.0f;
    if (time >= 0 && time < a.horizon) {
      const int at = (sample * a.horizon + time) * a.actions + action;
      x = step == 0 ? initial_at(a, at) : as_float(poll_word(a.workspace + a.sample_words + at, flag, watch));
    }
    to[i] = x;
  }
}
// The weights of such a convolution for the slice's channels, (taps, actions, channels), and the bias behind them, go
// to shared memory while the sample is waited for.
DPA_DEVICE void stage_head(const PhaseLoop& a, const Work& w, const float* weights, const float* bias, int taps,
                           float* to) {
  const int terms = taps * a.actions;
  Walk walk(thread(), w.by_value);
#pragma unroll 4
  for (; walk.row <= terms; walk.next()) {
    const int c = w.first_channel + walk.column;
    float x = 0.0f;
    if (walk.column < w.real_channels) x = walk.row < terms ? weights[walk.row * a.channels + c] : bias[c];
    to[walk.row * w.value_channels + walk.column] = x;
  }
}
// The first convolution, or with taps = 1 its 1x1 residual, of the sample: four channels of a row at a time. `local`:
// what is added, of sample 0, time 0 and channel 0, or null.
DPA_DEVICE void convolve_sample(const PhaseLoop& a, const Work& w, const float* sample, const float* weights, int taps,
                                const float* local, float* stash, int pitch) {
  const int halo = a.taps / 2, times = a.horizon + 2 * halo, terms = taps * a.actions, n = w.value_channels;
  Walk walk(thread(), w.by_floats);
#pragma unroll 1
  for (; walk.row < w.rows; walk.next()) {
    const int b = w.by_times(walk.row), t = walk.row - b * a.horizon;
    const float* from = weights + walk.column * 4;
    const float* x = sample + (b * times + t + (taps == 1 ? halo : 0)) * a.actions;
    float4 sum = *reinterpret_cast<const float4*>(from + terms * n);
#pragma unroll 4
    for (int i = 0; i < terms; i++) {
      const float4 f = *reinterpret_cast<const float4*>(from + i * n);
      const float y = x[i];
      sum.x += y * f.x, sum.y += y * f.y, sum.z += y * f.z, sum.w += y * f.w;
    }
    if (local && walk.column * 4 < w.real_channels) {
      const float4 f = *reinterpret_cast<const float4*>(local + (w.sample0 + b) * a.local_sample + t * a.channels +
                                                        w.first_channel + walk.column * 4);
      sum.x += f.x, sum.y += f.y, sum.z += f.z, sum.w += f.w;
    }
    *reinterpret_cast<float4*>(stash + walk.row * pitch + walk.column * 4) = sum;
  }
}

// Where four channels of a row lie in the slab. Its numbers are the caller's own: those of Work are read again behind
// each store to shared memory.
struct SlabPlace {
  Divisor by_times, by_unit;
  int pitch, sample, before, spread, value_channels, slab_value, unit_padded, unit_channels;
  explicit DPA_DEVICE SlabPlace(const Work& w)
      : by_times(w.by_times),
        by_unit(w.by_unit),
        pitch(w.slab_pitch),
        sample(w.sample_pitch - w.p.times_in * w.slab_pitch),
        before(w.p.pad * w.slab_pitch),
        spread(w.spread),
        value_channels(w.value_channels),
        slab_value(w.slab_value),
        unit_padded(w.p.unit_padded),
        unit_channels(w.p.unit_channels) {}
  // Byte offset. `channel` counts value and skip as Work::channels does.
  DPA_DEVICE int operator()(int row, int channel) const {
    int column = channel;
    if (spread) {
      const int half = channel < value_channels ? 0 : 1, c = channel - half * value_channels, unit = by_unit(c);
      column = half * slab_value + unit * unit_padded + c - unit * unit_channels;
    }
    return before + by_times(row) * sample + row * pitch + column * 2;
  }
};

// Finished values, of the skip beside them too, go straight to the slab. All loads of kItems are in flight together.
template <class Tile>
DPA_DEVICE void load_finished(const PhaseLoop& a, const Work& w, uint8_t* slab, uint32_t flag, Watch& watch) {
  constexpr int kItems = 8;
  const Phase& p = w.p;
  const SlabPlace place(w);
  const int n = w.value_channels, rows = w.rows, column0 = w.sample0 * p.times_in, value_stride = p.value.column_stride,
            skip_stride = p.skip.column_stride;
  const uint32_t *value = a.workspace + p.value.words + column0 * value_stride + w.first_channel,
                 *skip = a.workspace + p.skip.words + column0 * skip_stride + w.first_channel - n;
  Walk walk(thread(), w.by_quads);
#pragma unroll 1
  while (walk.row < rows) {
    const uint32_t* from[kItems];
    uint4 v[kItems];
    int to[kItems];
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      const bool inside = walk.row < rows;
      const int c = walk.column * 4;
      const uint32_t* at = c < n ? value + walk.row * value_stride : skip + walk.row * skip_stride;
      from[i] = inside ? at + c : from[0];
      to[i] = inside ? place(walk.row, c) : -1;
      walk.next();
    }
    poll(from, v, flag, watch);
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      if (to[i] < 0) continue;
      const float4 x = floats_of(v[i]);
      const float four[4] = {x.x, x.y, x.z, x.w};
      FourActivations<Tile>(four).store(slab + to[i], place.pitch);
    }
  }
}

// math::mish, or ReLU, by LoopArguments::steepness: without a branch where few instructions matter.
template <bool kExact>
DPA_DEVICE float activated(float x, float steepness) {
  if constexpr (kExact) {
    const float e = math::exponential(x < 20.0f ? x : 20.0f), n = e * (e + 2.0f);
    return steepness == 1.0f ? x * quotient_exact(n, n + 2.0f) : x < 0.0f ? 0.0f : x;
  }
  const float steep = x * steepness, e = exponential_fast(steep < 20.0f ? steep : 20.0f), n = e * (e + 2.0f);
  return x * quotient(n, n + 2.0f);
}

// The stash becomes the slab: four channels of a row at a time, norm, Mish or ReLU, FiLM, residual. Where slab is null,
// the finished values are kept in the workspace or else stay in place.
template <class Tile>
DPA_DEVICE void apply(const PhaseLoop& a, const Work& w, float* stash, int pitch, const float* residual,
                      const float* parameters, uint8_t* slab, uint32_t flag) {
  const Phase& p = w.p;
  const SlabPlace place(w);
  const int n = w.value_channels, residual_pitch = n + 4, rows = w.rows, keep_stride = p.keep_stride;
  const bool norm = p.norm >= 0, add = p.residual.kind != SourceKind::kNone, keep = p.keep >= 0 && w.at.out == 0,
             stays = !slab && p.keep < 0;
  uint32_t* kept = a.workspace + p.keep + w.sample0 * p.times_in * keep_stride + w.first_channel;
  const float steepness = a.steepness;
  Walk walk(thread(), w.by_quads);
#pragma unroll 1
  for (; walk.row < rows; walk.next()) {
    const int row = walk.row, c = walk.column * 4, b = place.by_times(row);
    float4* from = reinterpret_cast<float4*>(stash + row * pitch + c);
    const float4 x = *from;
    float v[4] = {x.x, x.y, x.z, x.w};
    if (c < n) {
      if (norm) {
        const float* f = parameters + 4 * b * n + c;
        const float4 factor = *reinterpret_cast<const float4*>(f), term = *reinterpret_cast<const float4*>(f + n),
                     scale = *reinterpret_cast<const float4*>(f + 2 * n),
                     shift = *reinterpret_cast<const float4*>(f + 3 * n);
        v[0] = activated<Tile::kWide>(v[0] * factor.x + term.x, steepness) * scale.x + shift.x;
        v[1] = activated<Tile::kWide>(v[1] * factor.y + term.y, steepness) * scale.y + shift.y;
        v[2] = activated<Tile::kWide>(v[2] * factor.z + term.z, steepness) * scale.z + shift.z;
        v[3] = activated<Tile::kWide>(v[3] * factor.w + term.w, steepness) * scale.w + shift.w;
      }
      if (add) {
        const float4 r = *reinterpret_cast<const float4*>(residual + row * residual_pitch + c);
        v[0] += r.x, v[1] += r.y, v[2] += r.z, v[3] += r.w;
      }
      if (keep)
        store_message_16(kept + row * keep_stride + c,
                         make_uint4((bits(v[0]) & ~1u) | flag, (bits(v[1]) & ~1u) | flag, (bits(v[2]) & ~1u) | flag,
                                    (bits(v[3]) & ~1u) | flag));
    }
    if (slab)
      FourActivations<Tile>(v).store(slab + place(row, c), place.pitch);
    else if (stays)
      *from = make_float4(v[0], v[1], v[2], v[3]);
  }
}

}  // namespace dpa::kernels::unet1d::device
