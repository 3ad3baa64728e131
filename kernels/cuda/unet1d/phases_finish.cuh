// A phase's tile that finishes one GroupNorm group of one sample, of a few values a thread: in registers from the partial
// sums to the floats that are kept, with one barrier, for the moments.
//
//   thread   four values of a row: of 16-bit types a word is channels g and g + 8, so the values are channels c, c + 1,
//            c + 8 and c + 9; of float32 neighbours
//   warp     its values' number, and their sums about its first one; then every thread joins those of all warps
#pragma once
#include "kernels/cuda/unet1d/phases_input.cuh"

namespace dpa::kernels::unet1d::device {

template <class Tile>
struct GroupFinisher {
  static constexpr int kValues = kGroupValues;
  static constexpr int kWordValues = Tile::kWide ? 1 : 2, kWords = kValues / kWordValues, kPartials = 8;
  using Math = typename Tile::Math;
  const PhaseLoop& a;
  const Work& w;
  const int thread;  // read here: what follows of it would be kept in registers through all phases
  int row, channel;  // the first one's, of the slice
  bool mine;
  float x[kValues];

  DPA_DEVICE GroupFinisher(const PhaseLoop& loop, const Work& work)
      : a(loop), w(work), thread(loaded(device::thread())), x{} {
    const Divisor by = w.by_floats;
    row = by(thread);
    const int word = (thread - row * by.by) * kWords;
    channel = Tile::kWide ? word : word / 8 * 16 + word % 8;
    mine = row < w.rows;
  }
  static DPA_DEVICE int behind(int j) { return Tile::kWide ? j : j % kWords + j / kWords * 8; }  // channels, of value j
  DPA_DEVICE int place(int stride) const { return (w.sample0 * w.p.times_in + row) * stride; }
  // Words that follow one another.
  using Words = uint32_t[kWords];
  static DPA_DEVICE void load(const uint32_t* from, Words& v) {
    if constexpr (kWords == 4) {
      const uint4 four = load_message_16(from);
      v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    } else {
      const uint2 two = load_message_8(from);
      v[0] = two.x, v[1] = two.y;
    }
  }
  static DPA_DEVICE void store(uint32_t* to, const float* v, uint32_t flag) {
    if constexpr (kWords == 4)
      store_message_16(to, make_uint4((bits(v[0]) & ~1u) | flag, (bits(v[1]) & ~1u) | flag, (bits(v[2]) & ~1u) | flag,
                                      (bits(v[3]) & ~1u) | flag));
    else
      store_message_8(to, make_uint2((bits(v[0]) & ~1u) | flag, (bits(v[1]) & ~1u) | flag));
  }
  // Whether words lack the flag, checked as Missing does.
  static DPA_DEVICE void check(uint32_t& missing, const Words& v, uint32_t flag) {
#pragma unroll
    for (int j = 0; j < kWords; j++) missing = or_xor(missing, v[j], flag);
  }

  // Of the norm and FiLM: loads that are waited for behind the moments.
  struct Parameters {
    float gamma[kValues], beta[kValues], scale[kValues], shift[kValues], more_scale[kValues], more_shift[kValues];
  };
  DPA_DEVICE void fetch(int norm, int step, Parameters& r) const {
    const int first = loaded(w.first_channel) + channel, channels = loaded(w.p.channels_in), film = loaded(w.p.film),
              sample = loaded(w.sample0);
    const float *const gamma = a.floats + (norm + first), *const beta = gamma + channels;
#pragma unroll
    for (int j = 0; j < kValues; j++) {
      r.gamma[j] = load_constant(gamma + behind(j)), r.beta[j] = load_constant(beta + behind(j));
      r.scale[j] = 1.0f, r.shift[j] = r.more_scale[j] = r.more_shift[j] = 0.0f;
    }
    if (film < 0) return;
    const float* const scale = a.film_step + step * a.film_step_stride + sample * a.film_sample_stride + (film + first);
    const float* const shift = a.film_scale ? scale + channels : scale;
#pragma unroll
    for (int j = 0; j < kValues; j++) {
      r.shift[j] = load_constant(shift + behind(j));
      if (a.film_scale) r.scale[j] = load_constant(scale + behind(j));
    }
    if (!a.film_cond) return;
    const float* const more = a.film_cond + static_cast<int64_t>(sample) * a.film_rows + (film + first);
    const float* const more_shift = a.film_scale ? more + channels : more;
#pragma unroll
    for (int j = 0; j < kValues; j++) {
      r.more_shift[j] = load_constant(more_shift + behind(j));
      if (a.film_scale) r.more_scale[j] = load_constant(more + behind(j));
    }
  }

  // A source's partial sums.
  struct Partials {
    const uint32_t* from;
    int count, stride;
    Words v[kPartials];
    DPA_DEVICE void load_all(uint32_t flag) {
#pragma unroll
      for (int k = 0; k < kPartials; k++) {
#pragma unroll
        for (int j = 0; j < kWords; j++) v[k][j] = flag;
        if (k < count) load(from + k * stride, v[k]);
      }
    }
    DPA_DEVICE void check_all(uint32_t& missing, uint32_t flag) const {
#pragma unroll
      for (int k = kPartials - 1; k >= 0; k--) check(missing, v[k], flag);
    }
    DPA_DEVICE void add_to(float (&sum)[kValues]) const {
#pragma unroll
      for (int k = 0; k < kPartials; k++)
#pragma unroll
        for (int j = 0; j < kWords; j++) {
          const uint32_t word = v[k][j] & ~1u;
          if constexpr (Tile::kWide) {
            sum[j] += as_float(word);
          } else {
            const float2 two = unpack(Math{}, word);
            sum[j] += two.x, sum[kWords + j] += two.y;
          }
        }
    }
    // Until all of them are there.
    DPA_DEVICE void poll(uint32_t flag, Watch& watch) {
      uint32_t missing;
      int polls = 0;
      do {
        missing = 0;
        load_all(flag);
        check_all(missing, flag);
      } while ((missing & 1) && watch.again(polls));
    }
  };
  DPA_DEVICE Partials partials(const PhaseSource& source) const {
    const int at = loaded(w.first_channel) + channel;
    return {a.workspace + loaded(source.words) + place(loaded(source.column_stride)) +
                (Tile::kWide ? at : at / 16 * 8 + at % 8),
            loaded(source.partials), loaded(source.partial_stride)};
  }

  // What is added to the value: partial sums, kept floats, or nothing. It is older, and needed last: it comes while the
  // value's moments are taken.
  struct Residual {
    SourceKind kind;
    Partials sums;
    const uint32_t* floats;
    Words kept[kWordValues];
    DPA_DEVICE void request(uint32_t flag) {
      if (kind == SourceKind::kPartials) sums.load_all(flag);
      if (kind == SourceKind::kFinished)
#pragma unroll
        for (int h = 0; h < kWordValues; h++) load(floats + h * 8, kept[h]);
    }
    DPA_DEVICE bool missing(uint32_t flag) const {
      uint32_t some = 0;
      if (kind == SourceKind::kPartials) sums.check_all(some, flag);
      if (kind == SourceKind::kFinished)
#pragma unroll
        for (int h = kWordValues - 1; h >= 0; h--) check(some, kept[h], flag);
      return some & 1;
    }
    DPA_DEVICE void add_to(float (&x)[kValues], uint32_t flag, Watch& watch) {
      int polls = 0;
      while (missing(flag) && watch.again(polls)) request(flag);
      float sum[kValues] = {};
      if (kind == SourceKind::kPartials) sums.add_to(sum);
      if (kind == SourceKind::kFinished)
#pragma unroll
        for (int j = 0; j < kValues; j++) sum[j] = as_float(kept[j / kWords][j % kWords] & ~1u);
#pragma unroll
      for (int j = 0; j < kValues; j++) x[j] += sum[j];
    }
  };
  DPA_DEVICE Residual residual() const {
    const PhaseSource& source = w.p.residual;
    const int at = loaded(w.first_channel) + channel;
    return {static_cast<SourceKind>(loaded(static_cast<int>(source.kind))),
            partials(source),
            a.workspace + loaded(source.words) + place(loaded(source.column_stride)) + at,
            {}};
  }

  // Mean and inverse deviation. The whole block calls it.
  DPA_DEVICE float2 statistics(float4* of_warps) const {
    const int counted = loaded(w.p.counted), channels = loaded(w.value_channels),
              warps = (loaded(w.rows) * channels / kValues + 31) / 32;
    const float inverse_count = w.inverse_count, first = shuffle_first(x[0]);
    float sum = 0.0f, squares = 0.0f, number = 0.0f;
#pragma unroll
    for (int j = 0; j < kValues; j++) {
      if (!mine || channel + behind(j) >= counted) continue;
      const float d = x[j] - first;
      sum += d, squares += d * d, number += 1.0f;
    }
#pragma unroll
    for (int m = 16; m; m >>= 1)
      sum += shuffle_xor(sum, m), squares += shuffle_xor(squares, m), number += shuffle_xor(number, m);
    if ((thread & 31) == 0) of_warps[thread >> 5] = make_float4(sum, squares, number, first);
    sync_block();
    float mean = 0.0f, within = 0.0f;
#pragma unroll
    for (int i = 0; i < kPhaseWarps; i++)
      if (i < warps) mean += of_warps[i].x + of_warps[i].w * of_warps[i].z;
    mean *= inverse_count;
#pragma unroll
    for (int i = 0; i < kPhaseWarps; i++) {  // squares about the mean, of those about a warp's first value
      if (i >= warps) continue;
      const float4 one = of_warps[i];
      const float apart = one.w - mean;
      within += one.y + apart * (2.0f * one.x + apart * one.z);
    }
    return make_float2(mean, inverse_root((within > 0.0f ? within * inverse_count : 0.0f) + 1e-5f));
  }

  DPA_DEVICE void run(int step, float4* of_warps, uint32_t flag, Watch& watch) {
    const int norm = loaded(w.p.norm);
    Parameters r;
    Residual more = {};
    if (mine) {
      Partials value = partials(w.p.value);
      value.poll(flag, watch);
      value.add_to(x);
      more = residual();
      more.request(flag);
      if (norm >= 0) fetch(norm, step, r);
    }
    const float2 moments = norm >= 0 ? statistics(of_warps) : make_float2(0.0f, 0.0f);
    if (!mine) return;
    const float steepness = a.steepness;
    if (norm >= 0) {
#pragma unroll
      for (int j = 0; j < kValues; j++) {
        const float factor = moments.y * r.gamma[j], term = r.beta[j] - moments.x * factor;
        x[j] = activated<Tile::kWide>(x[j] * factor + term, steepness) * (r.scale[j] + r.more_scale[j]) +
               (r.shift[j] + r.more_shift[j]);
      }
    }
    more.add_to(x, flag, watch);
    uint32_t* const to = a.workspace + w.p.keep + place(w.p.keep_stride) + w.first_channel + channel;
#pragma unroll
    for (int h = 0; h < kWordValues; h++) store(to + h * 8, x + h * kWords, flag);
  }
};

}  // namespace dpa::kernels::unet1d::device
