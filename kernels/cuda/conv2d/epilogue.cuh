// What becomes of a tile's sums: teams and splits are added, GroupNorm's moments taken and exchanged, rows stored.
#pragma once
#include "kernels/cuda/conv2d/mainloop.cuh"

namespace dpa::kernels::conv2d::device {

struct Moments {
  float count = 0, mean = 0, squares = 0;
  DPA_DEVICE void add(const Moments& o) {
    if (o.count == 0) return;
    const float all = count + o.count, difference = o.mean - mean, share = o.count / all;
    mean += difference * share;
    squares += o.squares + difference * difference * count * share;
    count = all;
  }
};
DPA_DEVICE float sum_of_warp(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}
// Of the first `count` lanes, at least: as few steps as they need. In the first lane.
DPA_DEVICE float sum_of_lanes(float x, int count) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2)
    if (mask < count) x += shuffle_xor(x, mask);
  return x;
}
// Of all of them, in one order: their mean, then what they deviate from it. The other lanes' counts are 0.
DPA_DEVICE Moments moments_of_lanes(const Moments& m, int lanes) {
  const float count = sum_of_lanes(m.count, lanes), sum = sum_of_lanes(m.count * m.mean, lanes);
  const float mean = count > 0 ? sum / count : 0.0f, difference = m.mean - mean;
  return {count, mean, sum_of_lanes(m.squares + m.count * difference * difference, lanes)};
}

// Words of messages carry the call's parity in the lowest bit, so that who reads knows whether they are of this call.
DPA_DEVICE uint32_t flagged(float x, uint32_t flag) { return (bits(x) & ~1u) | flag; }
DPA_DEVICE float plain(uint32_t x) { return as_float(x & ~1u); }
DPA_DEVICE bool arrived(const uint4& v, uint32_t flag) {
  return (((v.x ^ flag) | (v.y ^ flag) | (v.z ^ flag) | (v.w ^ flag)) & 1) == 0;
}
DPA_DEVICE uint4 poll_words(const uint32_t* from, uint32_t flag) {
  uint4 v = load_message_16(from);
  while (!arrived(v, flag)) pause(), v = load_message_16(from);
  return v;
}

// The moments of (sample, group), by the parts of all tiles that hold some of it.
DPA_DEVICE Moments moments_of_parts(const Conv& v, int sample, int group, int first_column_tile, int columns,
                                    uint32_t flag) {
  const int lane = thread() & 31;
  const int last = ((group + 1) * v.group_channels - 1) / columns, span = last - first_column_tile + 1;
  const uint32_t* from = v.moments + int64_t{sample * v.groups + group} * v.tiles_per_sample * v.span * v.sub * 4;
  const int parts = v.tiles_per_sample * span * v.sub;
  Moments m;
#pragma unroll 1
  for (int i = lane; i < parts; i += 32) {
    const int at = span == v.span ? i : i + i / (span * v.sub) * (v.span - span) * v.sub;
    const uint4 words = poll_words(from + at * 4, flag);
    const Moments part = {plain(words.x), plain(words.y), plain(words.z)};
    if (i == lane)
      m = part;
    else
      m.add(part);
  }
  return moments_of_lanes(m, parts);
}

// The threads that have a tile's sums.
DPA_DEVICE void sync_tile() { sync_threads(0, kThreads); }

template <class C, class T>
struct Epilogue {
  static constexpr Tiling t = C::kTiling;
  static constexpr int kPitch = t.pitch(), kColumns = t.columns(), kPieces = kColumns / T::kElements;
  static constexpr int kItems = (t.rows() * kPieces + kThreads - 1) / kThreads;
  // Few residual pieces wait in registers while messages are exchanged; where there are many, other blocks hide their
  // latency.
  static constexpr bool kEarly = kItems <= 2;
  static constexpr int kQuads = (t.rows() * kColumns / 4 + kThreads - 1) / kThreads;

  const Conv& v;
  const Tile& at;
  Parameters<C>& parameters;
  float* sums;  // (team, row, kPitch)
  int first_column, first_group, groups;

  DPA_DEVICE Epilogue(const Conv& conv, const Tile& tile)
      : v(conv),
        at(tile),
        parameters(Parameters<C>::at()),
        sums(reinterpret_cast<float*>(shared() + parameter_bytes(C::kTiling))),
        first_column(tile.column * kColumns) {
    first_group = first_column / v.group_channels;
    groups = (min(first_column + kColumns, v.out_channels) - 1) / v.group_channels - first_group + 1;
  }

  // Constants, before the dependency is awaited.
  DPA_DEVICE void load_parameters() const {
    const int mine = thread() % t.team();  // each team's barrier orders its own
    if (t.taps > 1 && mine < kChunkPieces) parameters.zeros[mine] = make_uint4(0, 0, 0, 0);
    for (int i = thread(); i < kColumns; i += kThreads) {
      const int channel = min(first_column + i, v.out_channels - 1);
      const float bias = v.bias ? v.bias[channel] : 0.0f, scale = v.scale ? v.scale[channel] : 1.0f,
                  shift = v.shift ? v.shift[channel] : 0.0f;
      // Without a GroupNorm between them, bias and shift are one.
      parameters.bias[i] = v.groups ? bias : 0.0f;
      parameters.scale[i] = scale;
      parameters.shift[i] = v.groups ? shift : bias * scale + shift;
      parameters.group[i] = channel / v.group_channels - first_group;
    }
  }

  DPA_DEVICE void keep(const Accumulators<C>& sum) const {
    const int lane = thread() & 31, team = thread() / t.team(), warp = thread() % t.team() / 32;
    float* to = sums + (team * t.rows() + (lane >> 2)) * kPitch + warp % t.warps_n * t.n_tiles * 16 + (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < t.m_tiles; i++)
#pragma unroll
      for (int j = 0; j < 2 * t.n_tiles; j++) {
        float* here = to + fragment_row<C>(warp, i) * kPitch + j * 8;
        *reinterpret_cast<float2*>(here) = {sum[i][j][0], sum[i][j][1]};
        *reinterpret_cast<float2*>(here + 8 * kPitch) = {sum[i][j][2], sum[i][j][3]};
      }
  }

  // Whether this block needs the whole sum of a row: with a GroupNorm it takes every row's moments.
  DPA_DEVICE bool mine(int row) const { return row < at.rows && row % v.splits == at.split; }
  DPA_DEVICE bool needs(int row) const { return v.groups ? row < at.rows : mine(row); }

  // Adds the teams' sums, the splits' and the bias. Each thread reads and writes quads of its own.
  DPA_DEVICE bool reduces() const { return t.warps_k > 1 || v.splits > 1 || (v.bias && v.groups); }
  DPA_DEVICE void reduce(uint32_t flag) const {
    const int64_t tile = int64_t{at.row * v.column_tiles + at.column} * v.splits;
    constexpr int kTile = t.rows() * kColumns;
#pragma unroll(kQuads > 4 ? 1 : kQuads)
    for (int k = 0; k < kQuads; k++) {
      const int i = k * kThreads + thread(), row = i / (kColumns / 4), column = i % (kColumns / 4) * 4;
      if (row >= at.rows) continue;
      float4* here = reinterpret_cast<float4*>(sums + row * kPitch + column);
      float4 x = *here;
#pragma unroll
      for (int team = 1; team < t.warps_k; team++) {
        const float4 y = here[team * t.rows() * kPitch / 4];
        x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
      }
      if (v.splits == 1) {
        add_bias(x, column);
      } else {
        const uint4 words = {flagged(x.x, flag), flagged(x.y, flag), flagged(x.z, flag), flagged(x.w, flag)};
        store_message_16(v.partials + (tile + at.split) * kTile + i * 4, words);
      }
      *here = x;
    }
    if (v.splits == 1) return;
#pragma unroll 1
    for (int k = 0; k < kQuads; k++) {
      const int i = k * kThreads + thread(), row = i / (kColumns / 4), column = i % (kColumns / 4) * 4;
      if (!needs(row)) continue;
      const uint32_t* from = v.partials + tile * kTile + i * 4;
      uint4 words[kMaxSplits];
#pragma unroll
      for (int s = 0; s < kMaxSplits; s++)
        if (s < v.splits) words[s] = load_message_16(from + int64_t{s} * kTile);
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int s = 0; s < kMaxSplits; s++) {
        if (s >= v.splits) continue;
        while (!arrived(words[s], flag)) pause(), words[s] = load_message_16(from + int64_t{s} * kTile);
        x.x += plain(words[s].x), x.y += plain(words[s].y), x.z += plain(words[s].z), x.w += plain(words[s].w);
      }
      add_bias(x, column);
      *reinterpret_cast<float4*>(sums + row * kPitch + column) = x;
    }
  }
  DPA_DEVICE void add_bias(float4& x, int column) const {
    const float* b = parameters.bias + column;
    x.x += b[0], x.y += b[1], x.z += b[2], x.w += b[3];
  }

  // Moments of each (sample, group) of the tile, by `sub` parts of the rows; a warp a part.
  DPA_DEVICE void take_moments(uint32_t flag) const {
    const int lane = thread() & 31, units = at.samples * groups * v.sub;
#pragma unroll 1
    for (int unit = thread() >> 5; unit < units; unit += kWarps) {
      const int pair = unit >> v.sub_bits, part = unit & (v.sub - 1);
      const int slot = at.samples > 1 ? pair / groups : 0, group = first_group + pair - slot * groups;
      const int rows = v.samples ? v.sample_rows : at.rows, first = slot * rows;
      const int begin = first + (rows * part >> v.sub_bits), end = first + (rows * (part + 1) >> v.sub_bits);
      const int left = max(group * v.group_channels - first_column, 0);
      const int width = min((group + 1) * v.group_channels - first_column, kColumns) - left;
      const Moments m = moments_of(begin, end, left, width);
      if (!v.exchange) {
        if (lane == 0) parameters.moments[unit] = {m.count, m.mean, m.squares, 0.0f};
      } else if (lane == 0 && at.split == 0) {
        const int64_t all = int64_t{(at.first_sample + slot) * v.groups + group} * v.tiles_per_sample;
        const int column = at.column - group * v.group_channels / kColumns;
        const int64_t to = ((all + at.row % v.tiles_per_sample) * v.span + column) * v.sub + part;
        store_message_16(v.moments + to * 4,
                         {flagged(m.count, flag), flagged(m.mean, flag), flagged(m.squares, flag), flag});
      }
    }
  }
  DPA_DEVICE Moments moments_of(int begin, int end, int left, int width) const {
    const int lane = thread() & 31;
    int bits = 5;  // lanes on the columns of a row: 2^bits
    while (1 << bits >> 1 >= width) bits--;
    const int lanes = 1 << bits, column = lane & (lanes - 1), row = lane >> bits, step = 32 >> bits;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll 1
    for (int c = column; c < width; c += lanes)
#pragma unroll 4
      for (int r = begin + row; r < end; r += step) sum += sums[r * kPitch + left + c];
    const float count = static_cast<float>((end - begin) * width);
    const float mean = count > 0 ? sum_of_warp(sum) / count : 0.0f;
#pragma unroll 1
    for (int c = column; c < width; c += lanes)
#pragma unroll 4
      for (int r = begin + row; r < end; r += step) {
        const float d = sums[r * kPitch + left + c] - mean;
        squares += d * d;
      }
    return {count, mean, sum_of_warp(squares)};
  }
  DPA_DEVICE void make_factors(uint32_t flag) const {
    const int lane = thread() & 31;
#pragma unroll 1
    for (int pair = thread() >> 5; pair < at.samples * groups; pair += kWarps) {
      Moments m;
      if (v.exchange) {
        const int slot = pair / groups, group = first_group + pair - slot * groups;
        m = moments_of_parts(v, at.first_sample + slot, group, group * v.group_channels / kColumns, kColumns, flag);
      } else {
        if (lane < v.sub) {
          const float4 part = parameters.moments[pair * v.sub + lane];
          m = {part.x, part.y, part.z};
        }
        if (v.sub > 1) m = moments_of_lanes(m, v.sub);
      }
      if (lane == 0) parameters.factors[pair] = {m.mean, inverse_root_exact(m.squares / m.count + v.eps)};
    }
  }

  // The rows of this split.
  DPA_DEVICE uint4* piece_at(const void* base, int row, int piece) const {
    return reinterpret_cast<uint4*>(const_cast<void*>(base)) + int64_t{at.first_row + row} * v.out_pieces +
           at.column * kPieces + piece;
  }
  // Zeros where there is none.
  DPA_DEVICE uint4 residual_at(int row, int piece) const {
    if (!v.residual || v.deferred || !mine(row) || at.column * kPieces + piece >= v.out_pieces)
      return make_uint4(0, 0, 0, 0);
    return load_16(piece_at(v.residual, row, piece));
  }
  DPA_DEVICE void load_vector(float (&x)[T::kElements], const float* from) const {
#pragma unroll
    for (int e = 0; e < T::kElements; e += 4) {
      const float4 quad = *reinterpret_cast<const float4*>(from + e);
      x[e] = quad.x, x[e + 1] = quad.y, x[e + 2] = quad.z, x[e + 3] = quad.w;
    }
  }
  DPA_DEVICE void store_piece(int row, int piece, const uint4& residual) const {
    const int column = piece * T::kElements;
    if (!mine(row) || at.column * kPieces + piece >= v.out_pieces) return;
    float x[T::kElements];
    load_vector(x, sums + row * kPitch + column);
    if (!v.deferred) {
      if (v.groups) {
        const float2* factors = parameters.factors + (v.samples > 1 ? row / v.sample_rows * groups : 0);
#pragma unroll
        for (int e = 0; e < T::kElements; e++) {
          const float2 f = factors[parameters.group[column + e]];
          x[e] = (x[e] - f.x) * f.y;
        }
      }
      float scale[T::kElements], shift[T::kElements], more[T::kElements];
      load_vector(scale, parameters.scale + column), load_vector(shift, parameters.shift + column);
      widen<T>(residual, more);
#pragma unroll
      for (int e = 0; e < T::kElements; e++) {
        x[e] = x[e] * scale[e] + shift[e] + more[e];
        if (v.relu) x[e] = x[e] < 0.0f ? 0.0f : x[e];
      }
    }
    if (first_column + column + T::kElements > v.out_channels) {
#pragma unroll
      for (int e = 0; e < T::kElements; e++)
        if (first_column + column + e >= v.out_channels) x[e] = 0.0f;
    }
    store_16(piece_at(v.out, row, piece), narrow<T>(x));
  }

  // Every consumer calls it; shared memory may be used again after a barrier.
  DPA_DEVICE void run(const Accumulators<C>& sum, uint32_t flag) const {
    constexpr int kKept = kEarly ? kItems : 1;
    uint4 residual[kKept];
    sync_tile();  // the circular buffers have been read
    keep(sum);
    if constexpr (kEarly) {
#pragma unroll
      for (int k = 0; k < kItems; k++) {
        const int i = k * kThreads + thread();
        residual[k] = residual_at(i / kPieces, i % kPieces);
      }
    }
    sync_tile();
    if (reduces()) {
      reduce(flag);
      sync_tile();
    }
    if (v.groups) {
      take_moments(flag);
      if (!v.exchange) sync_tile();  // messages say themselves that they are there
      if (!v.deferred) make_factors(flag);
      sync_tile();
    }
    if constexpr (kEarly) {
#pragma unroll
      for (int k = 0; k < kItems; k++) {
        const int i = k * kThreads + thread();
        store_piece(i / kPieces, i % kPieces, residual[k]);
      }
    } else {
#pragma unroll 2
      for (int k = 0; k < kItems; k++) {
        const int i = k * kThreads + thread();
        store_piece(i / kPieces, i % kPieces, residual_at(i / kPieces, i % kPieces));
      }
    }
  }
};

}  // namespace dpa::kernels::conv2d::device
