// The GEMM of a tile: 16 output channels times up to 128 columns (samples' times) a warp, warps over row tiles, columns
// and K. Partial sums of the warps that share an output meet in shared memory; the tile's sums go to the workspace.
#pragma once
#include "kernels/cuda/unet1d/phases_input.cuh"

namespace dpa::kernels::unet1d::device {

// Of each column: byte offset of its row from the slab's first row of zeros, tap 0 of a segment that begins at time
// -pad; its output column.
struct ColumnAt {
  int slab, out;
};
DPA_DEVICE void fill_columns(const Work& w, ColumnAt* to) {
  const Phase& p = w.p;
  const int scale = p.num_segments ? p.segments[0].time_stride : 1;
  for (int i = thread(); i < w.samples * p.columns; i += kThreads) {
    const int b = w.by_columns(i), t = i - b * p.columns;
    to[i] = {b * w.sample_pitch + t * p.time_stride * w.slab_pitch, (w.sample0 + b) * p.times_out + t * scale};
  }
}

struct Output {
  uint32_t* words;  // of this segment and slice of the input
  const ColumnAt* columns;
  const float* bias;  // of the tile's first row
  int rows;           // channels of the tile: from bias to scale
  int count, time_first, column_stride, first_tile;
  uint32_t flag;
};
// Stores a lane's sums of a row tile and column tile: rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
template <class Tile>
DPA_DEVICE void publish(const Output& o, int row_tile, int column_tile, int lane, const float4& v) {
  const int row = lane >> 2, local = (row_tile - o.first_tile) * 16 + row;
  const float bias[2] = {o.bias[local], o.bias[local + 8]};
  float scale[2] = {1.0f, 1.0f};
  if constexpr (Tile::kScaled) scale[0] = o.bias[o.rows + local], scale[1] = o.bias[o.rows + local + 8];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int column = column_tile * 8 + (lane & 3) * 2 + j;
    if (column >= o.count) continue;
    const float x = (j ? v.y : v.x) * scale[0] + bias[0], y = (j ? v.w : v.z) * scale[1] + bias[1];
    uint32_t* at = o.words + (o.columns[column].out + o.time_first) * o.column_stride;
    if constexpr (Tile::kWide) {
      store_message_word(at + row_tile * 16 + row, (bits(x) & ~1u) | o.flag);
      store_message_word(at + row_tile * 16 + row + 8, (bits(y) & ~1u) | o.flag);
    } else {
      store_message_word(at + row_tile * 8 + row, (pack(typename Tile::Math{}, x, y) & ~1u) | o.flag);
    }
  }
}

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

template <class Tile, int kColumnTiles>
DPA_DEVICE void multiply_run(WeightStream<Tile>& stream, const int* offsets, int count, uint32_t slab, int slab_pitch,
                             const ColumnAt* columns, int first_column, int num_columns,
                             float (&sum)[kColumnTiles][4]) {
  constexpr bool kWide = Tile::kWide, kOne = !kWide && kColumnTiles == 1;
  constexpr int kLoads = kWide || kOne ? kColumnTiles : kColumnTiles / 2;  // of four matrices, a step
  constexpr bool kBothSteps = !kWide && kLoads <= 4;  // are loaded before the first is multiplied, where registers are
  const int lane = thread() & 31;
  uint32_t rows[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; i++) {
    int column = first_column + (kWide || kOne ? i * 8 : i * 16 + (lane >> 4) * 8) + (lane & 7);
    if (column >= num_columns) column = 0;
    rows[i] = slab + columns[column].slab + lane_part<Tile>(slab_pitch);
  }
  RunSums<Tile, kColumnTiles> sums = {sum};
  int next0 = offsets[0], next1 = offsets[count > 1];
#pragma unroll 1
  for (int left = count; left > 0; left -= 2) {
    const bool two = left > 1;
    const uint32_t at = stream.wait();
    Fragments<Tile> a[2];
    a[0].load(at);
    if (two) a[1].load(at + Tile::kBytes);
    const int offset0 = next0, offset1 = next1;
    offsets += 2;
    if (left > 2) next0 = offsets[0], next1 = offsets[left > 3];
    // The stream's bookkeeping runs while the loads are under way; of float32 before, where that is faster.
    if constexpr (kWide) stream.refill();
    if constexpr (kOne) {
      uint32_t b[4];
      load_matrix_x4(b, rows[0] + (lane < 16 ? offset0 : offset1));
      stream.refill();
      sums.multiply_one(a[0], false, b[0], b[1]);
      if (two) sums.multiply_one(a[1], true, b[2], b[3]);
    } else {
      uint32_t b[kBothSteps ? 2 : 1][kLoads][4];
      auto load = [&](int s, int offset) {
#pragma unroll
        for (int i = 0; i < kLoads; i++) load_matrix_x4(b[kBothSteps ? s : 0][i], rows[i] + offset);
      };
      auto multiply = [&](int s) {
#pragma unroll
        for (int i = 0; i < kLoads; i++) sums.multiply(a[s], i, b[kBothSteps ? s : 0][i]);
      };
      load(0, offset0);
      if constexpr (kBothSteps) load(1, offset1);  // of an odd run's last pair the first step again
      if constexpr (!kWide) stream.refill();
      multiply(0);
      if (two) {
        if constexpr (!kBothSteps) load(1, offset1);
        multiply(1);
      }
    }
    stream.advance();
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
#pragma unroll
      for (int i = 0; i < kColumnTiles; i++)
        publish<Tile>(out, w.first_tile + row, column * kColumnTiles + i, lane,
                      make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]));
    }
  }
}

// Adds the warps' sums over K, in order, and stores them.
template <class Tile, int kColumnTiles>
DPA_DEVICE void reduce_tile(const Work& w, const float4* sums, const Output& out) {
  const Phase& p = w.p;
  const int warp = thread() >> 5, lane = thread() & 31, parts = p.warps_k;
#pragma unroll 1
  for (int i = warp; i < w.row_tiles * p.warps_columns * kColumnTiles; i += kPhaseWarps) {
    const int column_tile = i % kColumnTiles, rest = i / kColumnTiles, column = w.by_rows(rest),
              row = rest - column * w.row_tiles;
    const float4* from = sums + ((column * p.warps_rows + row) * parts * kColumnTiles + column_tile) * 32 + lane;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < kPhaseWarps; k++) {
      if (k >= parts) continue;
      const float4 more = from[k * kColumnTiles * 32];
      v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
    }
    publish<Tile>(out, out.first_tile + row, column * kColumnTiles + column_tile, lane, v);
  }
}

}  // namespace dpa::kernels::unet1d::device
