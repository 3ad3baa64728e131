// The GEMM of a tile: 16 output channels times up to 128 columns (samples' times) a warp, warps over row tiles, columns
// and K. Partial sums of the warps that share an output meet in shared memory; the tile's sums go to the workspace.
#pragma once
#include "kernels/cuda/unet1d/phases_input.cuh"

namespace dpa::kernels::unet1d::device {

// Of each column: byte offset of its row from the slab's first row of zeros, tap 0 of a segment that begins at time
// -pad; words to its output column. A lane stores two side by side, and reads both at once.
struct alignas(8) ColumnAt {
  int slab, out;
};
DPA_DEVICE void fill_columns(const Work& w, ColumnAt* to) {
  const Phase& p = w.p;
  const int scale = p.num_segments ? p.segments[0].time_stride : 1, stride = p.column_stride;
  for (int i = thread(); i < w.samples * p.columns; i += kThreads) {
    const int b = w.by_columns(i), t = i - b * p.columns;
    to[i] = {b * w.sample_pitch + t * p.time_stride * w.slab_pitch,
             ((w.sample0 + b) * p.times_out + t * scale) * stride};
  }
}

struct Output {
  uint32_t* words;  // of this segment, slice of the input and the tile's first row
  const ColumnAt* columns;
  const float* bias;  // of the tile's first row
  int rows;           // channels of the tile: from bias to scale
  int count;          // columns
  uint32_t flag;
};
// Where a lane stores its sums of a row tile: rows l / 4 and l / 4 + 8, of a column tile columns 2 (l % 4) and the next.
template <class Tile>
struct RowOutput {
  int first;
  float bias[2], scale[2] = {1.0f, 1.0f};
  DPA_DEVICE RowOutput(const Output& o, int row_tile, int lane)
      : first(row_tile * (Tile::kWide ? 16 : 8) + (lane >> 2)) {
    const float* from = o.bias + row_tile * 16 + (lane >> 2);
    bias[0] = from[0], bias[1] = from[8];
    if constexpr (Tile::kScaled) scale[0] = from[o.rows], scale[1] = from[o.rows + 8];
  }
  static DPA_DEVICE int first_column(int column_tile, int lane) { return column_tile * 8 + (lane & 3) * 2; }
  static DPA_DEVICE int2 places(const Output& o, int column) {
    const int4 two = *reinterpret_cast<const int4*>(o.columns + column);
    return make_int2(two.y, two.w);
  }
  DPA_DEVICE void store(const Output& o, bool inside, int at, float x, float y) const {
    uint32_t* to = o.words + (first + at);
    x = x * scale[0] + bias[0], y = y * scale[1] + bias[1];
    if constexpr (Tile::kWide) {
      store_message_word(to, (bits(x) & ~1u) | o.flag, inside);
      store_message_word(to + 8, (bits(y) & ~1u) | o.flag, inside);
    } else {
      store_message_word(to, (pack(typename Tile::Math{}, x, y) & ~1u) | o.flag, inside);
    }
  }
  DPA_DEVICE void publish(const Output& o, int column, const int2& at, const float4& v) const {
    store(o, column < o.count, at.x, v.x, v.z), store(o, column + 1 < o.count, at.y, v.y, v.w);
  }
};

// Byte offsets into the slab of the steps along K, (unit, tap, 16 channels of value, then of skip), segment by segment,
// behind the columns.
DPA_DEVICE int* offsets_of(const Work& w, ColumnAt* columns) {
  return reinterpret_cast<int*>(columns + w.samples * w.p.columns);
}
DPA_DEVICE void fill_offsets(const Work& w, int* to) {
  const int per_tap = w.by_per_tap.by, per_value = w.p.unit_padded >> 4, unit_bytes = w.p.unit_padded * 2,
            value_bytes = w.slab_value * 2;
#pragma unroll 1
  for (int s = 0; s < w.p.num_segments; s++) {
    const Divisor taps = w.by_taps[s];
    for (int i = thread(); i < w.all_steps[s]; i += kThreads) {
      const int before = w.by_per_tap(i), unit = taps(before), tap = before - unit * taps.by;
      const int part = i - before * per_tap, skip = part >= per_value;
      to[s * w.all_steps[0] + i] =
          unit * unit_bytes + skip * value_bytes + tap * w.slab_pitch + (part - skip * per_value) * 32;
    }
  }
}

// A warp's steps along K, two at a time as their weights come. What is multiplied next, up to four loads of a step, is
// loaded while the last is multiplied; of a single column tile a load brings two steps.
template <class Tile, int kColumnTiles>
DPA_DEVICE void multiply_run(WeightStream<Tile>& stream, const int* offsets, int count, uint32_t slab, int slab_pitch,
                             const ColumnAt* columns, int first_column, int num_columns,
                             float (&sum)[kColumnTiles][4]) {
  constexpr bool kWide = Tile::kWide, kOne = !kWide && kColumnTiles == 1;
  constexpr int kLoads = kWide || kOne ? kColumnTiles : kColumnTiles / 2;  // of four matrices, a step
  constexpr int kAtOnce = kLoads < 4 ? kLoads : 4, kParts = kLoads / kAtOnce;
  const int lane = thread() & 31;
  uint32_t rows[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; i++) {
    int column = first_column + (kWide || kOne ? i * 8 : i * 16 + (lane >> 4) * 8) + (lane & 7);
    if (column >= num_columns) column = 0;
    rows[i] = slab + columns[column].slab + lane_part<Tile>(slab_pitch);
  }
  RunSums<Tile, kColumnTiles> sums = {sum};
  Fragments<Tile> a[2];
  int offset0 = offsets[0], offset1 = offsets[count > 1];
  const auto read_offsets = [&](int left) {
    offsets += 2;
    if (left > 2) offset0 = offsets[0], offset1 = offsets[left > 3];
  };
  if constexpr (kOne) {
#pragma unroll 1
    for (int left = count; left > 0; left -= 2) {
      const uint32_t at = stream.wait();
      uint32_t b[4];
      a[0].load(at);
      if (left > 1) a[1].load(at + Tile::kBytes);
      load_matrix_x4(b, rows[0] + (lane < 16 ? offset0 : offset1));
      read_offsets(left);
      stream.refill();
      sums.multiply_one(a[0], false, b[0], b[1]);
      if (left > 1) sums.multiply_one(a[1], true, b[2], b[3]);
    }
  } else {
    uint32_t b[2][kAtOnce][4];
    const auto load = [&](int set, int part, int offset) {
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) load_matrix_x4(b[set & 1][i], rows[part * kAtOnce + i] + offset);
    };
    const auto multiply = [&](int step, int set, int part) {
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) sums.multiply(a[step], part * kAtOnce + i, b[set & 1][i]);
    };
    a[0].load(stream.wait()), load(0, 0, offset0);
#pragma unroll 1
    for (int left = count; left > 0; left -= 2) {
      const bool two = left > 1, more = left > 2;
      const int second = offset1;
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        if (part + 1 < kParts)
          load(part + 1, part + 1, offset0);
        else if (two)
          a[1].load(stream.slot + Tile::kBytes), load(kParts, 0, second);
        multiply(0, part, part);
      }
      read_offsets(left);
      stream.refill();
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        if (part + 1 < kParts) {
          if (two) load(kParts + part + 1, part + 1, second);
        } else if (more) {
          a[0].load(stream.wait()), load(0, 0, offset0);
        }
        if (two) multiply(1, kParts + part, part);
      }
    }
  }
  sums.finish();
}

// One segment of a tile. Every thread of the block calls it; the slab is complete. `sums` may be overwritten by the
// caller after a barrier.
template <class Tile, int kColumnTiles>
DPA_DEVICE void multiply_tile(WeightStream<Tile>& stream, const Work& w, int segment, uint32_t slab, float4* sums,
                              const Output& out) {
  const Phase& p = w.p;
  const PhaseSegment& g = p.segments[segment];
  const int warp = thread() >> 5, lane = thread() & 31, column = w.warp_column[warp];
  const WarpSteps mine = w.steps[segment][warp];
  const uint32_t first_tap = slab + (g.first + p.pad) * w.slab_pitch;
  const int* offsets = offsets_of(w, const_cast<ColumnAt*>(out.columns));
  int row = w.warp_row[warp];
#pragma unroll 1
  for (int round = 0; round < w.rounds; round++, row += p.warps_rows) {
    const bool works = mine.count > 0 && row < w.row_tiles;
    float sum[kColumnTiles][4] = {};
    if (works)
      multiply_run<Tile, kColumnTiles>(stream, offsets + segment * w.all_steps[0] + mine.begin, mine.count, first_tap,
                                       w.slab_pitch, out.columns, column * kColumnTiles * 8, out.count, sum);
    if (p.warps_k > 1) {
#pragma unroll
      for (int i = 0; i < kColumnTiles; i++)
        sums[(warp * kColumnTiles + i) * 32 + lane] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    } else if (works) {
      // What several stores need is read ahead of them: behind a store the compiler reads nothing early.
      constexpr int kAtOnce = kColumnTiles < 4 ? kColumnTiles : 4;
      const RowOutput<Tile> to(out, row, lane);
#pragma unroll
      for (int first = 0; first < kColumnTiles; first += kAtOnce) {
        const int at = to.first_column(column * kColumnTiles + first, lane);
        int2 places[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) places[i] = to.places(out, at + i * 8);
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
          const float(&v)[4] = sum[first + i];
          to.publish(out, at + i * 8, places[i], make_float4(v[0], v[1], v[2], v[3]));
        }
      }
    }
  }
}

// Adds the warps' sums over K, in order, and stores them.
template <class Tile, int kColumnTiles>
DPA_DEVICE void reduce_tile(const Work& w, const float4* sums, const Output& out) {
  const int warp = thread() >> 5, lane = thread() & 31, parts = w.p.warps_k, rows = w.row_tiles,
            warps_rows = w.p.warps_rows;
  const unsigned count = rows * w.p.warps_columns * kColumnTiles;
  const Divisor by_rows = w.by_rows;
#pragma unroll 1
  for (unsigned i = warp; i < count; i += kPhaseWarps) {
    const int column_tile = i % kColumnTiles, rest = i / kColumnTiles, column = by_rows(rest),
              row = rest - column * rows;
    const float4* from = sums + ((column * warps_rows + row) * parts * kColumnTiles + column_tile) * 32 + lane;
    const RowOutput<Tile> to(out, row, lane);
    const int at = to.first_column(column * kColumnTiles + column_tile, lane);
    const int2 places = to.places(out, at);
    float4 v = *from;
    const auto add = [&](int k) {
      if (k >= parts) return;
      const float4 more = from[k * kColumnTiles * 32];
      v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
    };
#pragma unroll
    for (int k = 1; k < 4; k++) add(k);
    if (parts > 4) {
#pragma unroll
      for (int k = 4; k < kPhaseWarps; k++) add(k);
    }
    to.publish(out, at, places, v);
  }
}

}  // namespace dpa::kernels::unet1d::device
