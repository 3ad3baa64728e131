// The mainloop of mma_convolution.cu: the sums of a tile, in shared memory.
//
// Rows of A and of weights along K lie in a stage as 128 bytes, sixteen at a time at the place that the row's number
// permutes (swizzle); weights along N as pieces of 64 channels n, a row of K each.
//
// Of pairs of float16 numbers (Conv1d::halves) the chunks come three times, as in convolution_kernel.cuh: high halves of
// x by low halves of the weights, low by high, then high by high, whose slices are summed up alone, two at a time, and
// then added, rounded to the nearest.
#pragma once
#include "kernels/cuda/conv1d/mma_multiply.cuh"
#include "kernels/math/two_halves.h"
#include "kernels/plans/conv1d/mma_plan.h"

namespace dpa::kernels::conv1d {

struct MmaArgs {
  MmaPlan plan;
  int batch, in_length, out_length, outputs, contracted;
  const void *x, *more, *weights;     // `more`: the second of two tensors that x is side by side
  int x_vectors, first_vectors;       // sixteen bytes of a row of x; of the first tensor's
  uint32_t tap_vectors, row_vectors;  // of the packed weights: of a tap, and of a row
  int taps;                           // planes of weights, before as many of their low halves or second parts
  // Where several blocks have a tile: [tile][block][row][column], which a second launch adds.
  float* partials = nullptr;
  bool adds = false;  // this is the second one
};

// dgrad reads 16-bit weights as fprop does, halves too, and those of tf32 transposed.
inline MmaArgs mma_args(const MmaPlan& plan, const Conv1d& conv, bool is_dgrad, const void* x, const void* more,
                        const void* weights) {
  const int64_t in = is_dgrad ? conv.y_channels : conv.x_channels, out = is_dgrad ? conv.x_channels : conv.y_channels;
  const bool tf32 = conv.dtype == DType::kFloat32 && !conv.halves, by_out = is_dgrad && !tf32;  // packed rows
  const int vector = tf32 ? 4 : 8;
  const int64_t row = padded(by_out ? out : in) / vector, rows = by_out ? in : out, vectors = padded(in) / vector;
  return {plan,
          static_cast<int>(conv.batch),
          static_cast<int>(is_dgrad ? conv.y_length : conv.x_length),
          static_cast<int>(is_dgrad ? conv.x_length : conv.y_length),
          static_cast<int>(out),
          static_cast<int>(in),
          x,
          more,
          weights,
          static_cast<int>(vectors),
          static_cast<int>(more ? conv.first_channels / vector : vectors),
          static_cast<uint32_t>(rows * row),
          static_cast<uint32_t>(row),
          conv.taps};
}

// What a block contracts: from `first` to before `end` of the chunks of all rounds, one round's behind the other's.
template <bool kTwoHalves>
struct MmaWork {
  int first, end;
  int chunks;  // of a round

  DPA_DEVICE MmaWork(const MmaArgs& args, int part)
      : first(part * args.plan.split_chunks), chunks(args.plan.conv.chunks) {
    const int last = first + args.plan.split_chunks, all = kTwoHalves ? kRounds * chunks : chunks;
    end = last < all ? last : all;
  }
  DPA_DEVICE int last_round() const { return (kRounds - 1) * chunks; }
  // The channels of chunk `index`, and whether it is of low halves of x, or of the weights.
  DPA_DEVICE int channels(int index) const { return kTwoHalves ? index % chunks : index; }
  DPA_DEVICE bool low_x(int index) const { return kTwoHalves && index / chunks == 1; }
  DPA_DEVICE bool low_weights(int index) const { return kTwoHalves && index < chunks; }
};

struct MmaTile {
  int phase, first_sample, first_time, first_column;
};

template <int kRows_, int kColumns_>
struct MmaShape {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kStages = mma_stages(kRows, kColumns);
  // A warp multiplies 64 rows by 32 columns, of every kGroups-th slice of K.
  static constexpr int kRowWarps = kRows / 64, kColumnWarps = kColumns / 32;
  static constexpr int kGroups = kMmaThreads / 32 / (kRowWarps * kColumnWarps);
  static constexpr int kSlices = 4;  // of 32 bytes of K, in a step
  static constexpr int kWeightBytes = kColumns * 128, kStride = kColumns + 8;
  static_assert(kSlices % kGroups == 0, "every warp has as many slices");
};

// Where a thread's first copy goes in a stage: the next ones are 32 rows further, whose swizzle is the same.
DPA_DEVICE uint32_t copy_place() {
  const int row = device::thread() / 8, v = device::thread() % 8;
  return row * 128 + ((v ^ (row & 7)) << 4);
}

// A thread's copies of a box of x: which row each is of.
template <class T>
struct BoxCopies {
  static constexpr int kCopies = kMaxBoxRows * 8 / kMmaThreads;
  static constexpr uint32_t kNone = ~0u;
  uint32_t rows[kCopies];

  DPA_DEVICE BoxCopies(const MmaArgs& args, const MmaTile& tile, int first_time) {
    const int samples = args.plan.conv.rows.samples;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = device::thread() / 8 + i * (kMmaThreads / 8);
      const int time = row / samples, sample = tile.first_sample + row - time * samples;
      const bool there = time < args.plan.box_times && sample < args.batch && first_time + time < args.in_length;
      rows[i] = there ? sample * args.in_length + first_time + time : kNone;
    }
  }
  // Of high halves, or `low` ones.
  DPA_DEVICE void load(const MmaArgs& args, int chunk, bool low, uint32_t to) const {
    const int vector = chunk * 8 + device::thread() % 8;
    const bool inside = vector < args.x_vectors, first = vector < args.first_vectors;
    const uint32_t width = first ? args.first_vectors : args.x_vectors - args.first_vectors;
    const auto* x = static_cast<const uint8_t*>(first || !inside ? args.x : args.more);
    if (inside) x += (first ? vector : vector - args.first_vectors) * 16;
    if (low && inside) x += uint64_t{static_cast<uint32_t>(args.batch * args.in_length) * width} * 16;
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      if (rows[i] != kNone)
        device::copy_async_16_or_zeros(to + i * 4096, inside ? x + uint64_t{rows[i] * width} * 16 : x, inside);
  }
};

// A thread's copies of the weights of a step.
template <class Shape, bool kMajorN>
struct WeightCopies {
  static constexpr int kCopies = Shape::kColumns * 8 / kMmaThreads;
  uint32_t from;  // of the first copy, of tap 0 and chunk 0, in sixteen bytes
  int columns;    // from the first copy's on

  DPA_DEVICE WeightCopies(const MmaArgs& args, int first_column) {
    const int row = device::thread() / 8, v = device::thread() % 8;
    if constexpr (kMajorN) {
      columns = args.outputs - first_column - v * 8;
      from = row * args.row_vectors + first_column / 8 + v;
    } else {
      columns = args.outputs - first_column - row;
      from = (first_column + row) * args.row_vectors + v;
    }
  }
  DPA_DEVICE void load(const MmaArgs& args, int tap, int chunk, uint32_t to) const {
    const auto* weights = static_cast<const uint8_t*>(args.weights);
    const uint32_t step = tap * args.tap_vectors + chunk * (kMajorN ? 64 * args.row_vectors : 8);
    const int row = device::thread() / 8, v = device::thread() % 8;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (columns <= (kMajorN ? i / 2 * 64 : i * 32)) continue;
      const bool inside = kMajorN ? chunk * 64 + i % 2 * 32 + row < args.contracted
                                  : chunk * 8 + v < static_cast<int>(args.row_vectors);
      const uint32_t further = kMajorN ? i % 2 * 32 * args.row_vectors + i / 2 * 8 : i * 32 * args.row_vectors;
      device::copy_async_16_or_zeros(to + i * 4096, inside ? weights + uint64_t{from + step + further} * 16 : weights,
                                     inside);
    }
  }
};

// A lane's rows of A: row lane % 16 of each of the warp's four row tiles.
template <int kStride>
struct LaneRows {
  static constexpr int kTiles = kStride == 1 ? 1 : 4;  // of stride 1 the tiles are sixteen rows of the box apart
  int box[kTiles];                                     // row of the box, at shift 0
  uint32_t inside[2];                                  // two tiles each: a bit a term, whether the row is no padding

  DPA_DEVICE LaneRows(const ConvPlan& plan, const MmaTile& tile, int first_time, int first_row, int in_length) {
    const int lane = device::thread() % 32;
    inside[0] = inside[1] = 0;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int row = first_row + m * 16 + lane % 16, j = row / plan.rows.samples;
      const int time = (tile.first_time + j) * kStride;
      if (m < kTiles) box[m] = (time - first_time) * plan.rows.samples + row - j * plan.rows.samples;
      for (int i = 0; i < plan.terms[tile.phase] && j < plan.rows.time; ++i) {
        const int u = time + plan.shift[tile.phase][i];
        if (u >= 0 && u < in_length) inside[m / 2] |= 1u << (m % 2 * 16 + i);
      }
    }
  }
  // Where the rows of a term begin, with the swizzle of the sixteen bytes that the lane reads first; or zeros.
  DPA_DEVICE void places(uint32_t (&rows)[4], uint32_t box_at, int shifted, int term, uint32_t zeros) const {
    const uint32_t half = device::thread() % 32 / 16 << 4;
    const auto place = [&](int row) { return box_at + row * 128 + ((row & 7) << 4 ^ half); };
    const uint32_t bits[2] = {inside[0] >> term, inside[1] >> term};
    const uint32_t first = place(box[0] + shifted);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const uint32_t at = kStride == 1 ? first + m * 2048 : place(box[m % kTiles] + shifted);
      rows[m] = bits[m / 2] & (m % 2 ? 0x10000u : 1u) ? at : zeros;
    }
  }
};

// The warp's sums into the tile, those of the groups one after the other.
template <class Shape>
DPA_DEVICE void store_groups(float* tile, const float (&sums)[4][4][4], int group, int row, int column) {
  const int lane = device::thread() % 32;
  float* to = tile + (row + lane / 4) * Shape::kStride + column + lane % 4 * 2;
#pragma unroll 1
  for (int g = 0; g < Shape::kGroups; ++g) {
    device::sync_block();
    if (g != group) continue;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float2* const at = reinterpret_cast<float2*>(to + (m * 16 + half * 8) * Shape::kStride + n * 8);
          float2 sum = {sums[m][n][half * 2], sums[m][n][half * 2 + 1]};
          if (g > 0) sum.x += at->x, sum.y += at->y;
          *at = sum;
        }
  }
  device::sync_block();
}

// Every thread of the block calls it. The tile lies at `tile_of_sums`, which begins behind a row of zeros.
DPA_DEVICE float* tile_of_sums() { return reinterpret_cast<float*>(device::shared() + 128); }

// Four columns at a time of the tile, and of a block's partial sums.
template <class Shape, class F>
DPA_DEVICE void each_vector(F&& f) {
  auto* const tile = reinterpret_cast<float4*>(tile_of_sums());
  constexpr int kVectors = Shape::kColumns / 4;
  for (int e = device::thread(); e < Shape::kRows * kVectors; e += kMmaThreads)
    f(tile[e / kVectors * (Shape::kStride / 4) + e % kVectors], e);
}
template <class Shape>
DPA_DEVICE float4* partials_of(const MmaArgs& args, int64_t block) {
  return reinterpret_cast<float4*>(args.partials) + block * (Shape::kRows * Shape::kColumns / 4);
}
// What `sum_tile` left in the tile, to the partial sums of block `index`.
template <class Shape>
DPA_DEVICE void store_partials(const MmaArgs& args, unsigned index) {
  float4* const to = partials_of<Shape>(args, index);
  each_vector<Shape>([&](float4& sums, int e) { to[e] = sums; });
}
// The tile `index` from the partial sums of all its blocks, in their order.
template <class Shape>
DPA_DEVICE void add_partials(const MmaArgs& args, unsigned index) {
  const float4* const from = partials_of<Shape>(args, int64_t{index} * args.plan.splits);
  each_vector<Shape>([&](float4& sums, int e) {
    float4 total = from[e];
    for (int i = 1; i < args.plan.splits; ++i) {
      const float4 v = from[i * (Shape::kRows * Shape::kColumns / 4) + e];
      total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
    }
    sums = total;
  });
  device::sync_block();
}

// Of the `part`-th of a tile's blocks. In full a stage has both parts of a term's weights.
template <class T, class Shape, bool kMajorN, int kStride = 1, bool kTwoHalves = false, bool kInFull = false>
DPA_DEVICE void sum_tile(const MmaArgs& args, const MmaTile& tile, int part) {
  const ConvPlan& plan = args.plan.conv;
  const int thread = device::thread(), warp = thread / 32;
  const int column = warp % Shape::kColumnWarps * 32, row_warp = warp / Shape::kColumnWarps % Shape::kRowWarps;
  const int group = warp / (Shape::kColumnWarps * Shape::kRowWarps);
  const int before = tile.first_time * kStride + plan.lowest, first_time = before > 0 ? before : 0;
  constexpr int kParts = kInFull ? 2 : 1, kStages = Shape::kStages / kParts;
  constexpr int kStageBytes = kParts * Shape::kWeightBytes;
  const int parts = kIsFloat<T> && !kInFull ? plan.parts : 1;  // of a weight: a step of a chunk each
  const auto term_of = [&](int step) { return kIsFloat<T> ? step >> (parts - 1) : step; };
  const int steps = plan.terms[tile.phase] * parts, boxes = args.plan.boxes;
  const int first_step = plan.first_term[row_warp] * parts, end_step = plan.end_term[row_warp] * parts;
  const MmaWork<kTwoHalves> work(args, part);
  const uint32_t zeros = device::shared_address(device::shared()), memory = zeros + 128, place = copy_place();
  const uint32_t box_bytes = args.plan.box_bytes, weights = memory + args.plan.weights_at;
  if (thread < 32) reinterpret_cast<uint32_t*>(device::shared())[thread] = 0;

  const BoxCopies<T> box_copies(args, tile, first_time);
  const WeightCopies<Shape, kMajorN> weight_copies(args, tile.first_column);
  const LaneRows<kStride> lane_rows(plan, tile, first_time, row_warp * 64, args.in_length);
  const uint32_t lane_weight = weights + lane_weights<kMajorN>(column);
  float sums[4][4][4] = {};

  // Which step's weights are loaded next. Their stage is the one before that which is multiplied.
  int next_step = 0, load_chunk = work.first;
  const auto load_step = [&](int stage) {
    if (load_chunk < work.end) {
      const bool low = work.low_weights(load_chunk) || (next_step & (parts - 1));
      const int tap = plan.tap[tile.phase][term_of(next_step)] + (low ? args.taps : 0);
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        weight_copies.load(args, tap + part * args.taps, work.channels(load_chunk),
                           weights + place + stage * kStageBytes + part * Shape::kWeightBytes);
    }
    device::copy_async_commit();
    if (++next_step == steps) next_step = 0, ++load_chunk;
  };
  const auto load_box = [&](int chunk, int stage) {
    if (chunk < work.end)
      box_copies.load(args, work.channels(chunk), work.low_x(chunk), memory + place + stage * box_bytes);
  };
#pragma unroll 1
  for (int i = 0; i < boxes - 1; ++i) load_box(work.first + i, i);
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) load_step(i);

  // What has been summed up is of low halves.
  [[maybe_unused]] const auto scale_low = [&] {
#pragma unroll
    for (int e = 0; e < 64; ++e) sums[e / 16][e / 4 % 4][e % 4] *= 1 / math::kLowScale;
  };
  int step = 0, chunk = work.first, stage = 0, box = 0;
#pragma unroll 1
  while (chunk < work.end) {
    device::copy_async_wait<kStages - 2>();
    device::sync_block();
    if (step == 0) load_box(chunk + boxes - 1, box == 0 ? boxes - 1 : box - 1);
    load_step(stage == 0 ? kStages - 1 : stage - 1);
    if constexpr (kTwoHalves) {
      if (step == 0 && chunk == work.last_round()) scale_low();
    }
    if (step >= first_step && step < end_step) {
      uint32_t rows[4];
      const int term = term_of(step);
      lane_rows.places(rows, memory + box * box_bytes, plan.shift[tile.phase][term] * plan.rows.samples, term, zeros);
      const uint32_t at = lane_weight + stage * kStageBytes;
      if constexpr (kInFull)
        add_parts<Shape>(sums, rows, at, at + Shape::kWeightBytes, group);
      else if (kTwoHalves && chunk >= work.last_round())
        add_step<T, Shape, kMajorN>(sums, rows, at, group);
      else
        multiply_step<T, Shape, kMajorN>(sums, rows, at, group);
    }
    if (++stage == kStages) stage = 0;
    if (++step == steps) {
      step = 0, ++chunk;
      if (++box == boxes) box = 0;
    }
  }
  device::copy_async_wait<0>();
  if constexpr (kTwoHalves) {
    if (work.end <= work.last_round()) scale_low();
  }
  store_groups<Shape>(tile_of_sums(), sums, group, row_warp * 64, column);
}

// The tile of block `index`.
template <class Shape>
DPA_DEVICE MmaTile mma_tile(const ConvPlan& plan, unsigned index) {
  MmaTile tile;
  const unsigned columns = static_cast<unsigned>(plan.column_tiles), per_sample = plan.rows.per_sample;
  tile.first_column = index % columns * Shape::kColumns, index /= columns;
  tile.phase = plan.phases == 1 ? 0 : index & 1, index = plan.phases == 1 ? index : index >> 1;
  tile.first_sample = index / per_sample * plan.rows.samples;
  tile.first_time = index % per_sample * plan.rows.time;
  return tile;
}

}  // namespace dpa::kernels::conv1d
