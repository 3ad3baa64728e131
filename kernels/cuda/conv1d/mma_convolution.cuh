// The mainloop of mma_convolution.cu: the sums of a tile, in shared memory.
//
// Rows of A and of weights along K lie in a stage as 128 bytes, sixteen at a time at the place that the row's number
// permutes (swizzle); weights along N as pieces of 64 channels n, a row of K each.
#pragma once
#include "kernels/cuda/conv1d/mma_device.cuh"
#include "kernels/plans/conv1d/mma_plan.h"

namespace dpa::kernels::conv1d {

struct MmaArgs {
  MmaPlan plan;
  int64_t batch, in_length, out_length, outputs, contracted;
  const void *x, *weights;
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

// A thread's copies of a box of x: where each row begins, in sixteen bytes from the tensor's start.
template <class T>
struct BoxCopies {
  static constexpr int kCopies = kMaxBoxRows * 8 / kMmaThreads;
  static constexpr uint32_t kNone = ~0u;
  uint32_t from[kCopies];
  int vectors;  // sixteen bytes of a row of the tensor

  DPA_DEVICE BoxCopies(const MmaArgs& args, const MmaTile& tile, int first_time) {
    const int samples = args.plan.conv.rows.samples;
    vectors = static_cast<int>(padded_channels(args.contracted) * kSize<T> / 16);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const unsigned row = device::thread() / 8 + i * (kMmaThreads / 8);
      const unsigned time = row / samples, sample = tile.first_sample + (row - time * samples);
      const bool there = static_cast<int>(time) < args.plan.box_times && sample < args.batch &&
                         static_cast<int64_t>(first_time) + time < args.in_length;
      from[i] = there ? static_cast<uint32_t>((sample * args.in_length + first_time + time) * vectors) : kNone;
    }
  }
  DPA_DEVICE void load(const MmaArgs& args, int chunk, uint32_t to) const {
    const int v = device::thread() % 8, at = chunk * 8 + v;
    const auto* x = static_cast<const uint8_t*>(args.x);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (from[i] == kNone) continue;
      const int row = device::thread() / 8 + i * (kMmaThreads / 8);
      const bool inside = at < vectors;
      device::copy_16_or_zeros(to + row * 128 + ((v ^ (row & 7)) << 4),
                               x + (int64_t{from[i]} + (inside ? at : 0)) * 16, inside);
    }
  }
};

// A thread's copies of the weights of a step.
template <class T, class Shape, bool kMajorN>
struct WeightCopies {
  static constexpr int kCopies = Shape::kColumns * 8 / kMmaThreads;
  int64_t tap_bytes, row_bytes;

  DPA_DEVICE explicit WeightCopies(const MmaArgs& args) {
    const int64_t width = padded_channels(kMajorN ? args.outputs : args.contracted);
    row_bytes = width * kSize<T>;
    tap_bytes = row_bytes * (kMajorN ? args.contracted : args.outputs);
  }
  DPA_DEVICE void load(const MmaArgs& args, const MmaTile& tile, int tap, int chunk, uint32_t to) const {
    const auto* weights = static_cast<const uint8_t*>(args.weights) + tap * tap_bytes;
    const int v = device::thread() % 8;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = device::thread() / 8 + i * (kMmaThreads / 8);
      const uint32_t at = to + row * 128 + ((v ^ (row & 7)) << 4);
      if constexpr (kMajorN) {
        const int64_t k = chunk * 64 + row % 64, n = tile.first_column + row / 64 * 64 + v * 8;
        if (n >= args.outputs) continue;
        const bool inside = k < args.contracted;
        device::copy_16_or_zeros(at, weights + (inside ? k * row_bytes + n * 2 : 0), inside);
      } else {
        const int64_t n = tile.first_column + row, byte = chunk * 128 + v * 16;
        if (n >= args.outputs) continue;
        const bool inside = byte < row_bytes;
        device::copy_16_or_zeros(at, weights + (inside ? n * row_bytes + byte : 0), inside);
      }
    }
  }
};

// A lane's rows of A: matrix rows of the warp's four row tiles, times 16 bytes.
struct LaneRows {
  int box[4], time[4];  // row of the box, and time, at shift 0

  DPA_DEVICE LaneRows(const ConvPlan& plan, const MmaTile& tile, int first_time, int first_row) {
    const int lane = device::thread() % 32;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int row = first_row + m * 16 + lane % 16, j = row / plan.rows.samples;
      time[m] = j < plan.rows.time ? (tile.first_time + j) * plan.stride : INT32_MIN / 2;
      box[m] = (time[m] - first_time) * plan.rows.samples + row - j * plan.rows.samples;
    }
  }
};

// The MMAs of a warp in one step, on its slices of 32 bytes of K.
template <class T, class Shape, bool kMajorN>
DPA_DEVICE void multiply_step(float (&sums)[4][4][4], const uint32_t (&rows)[4], uint32_t weights, int group,
                              int column) {
  const int lane = device::thread() % 32;
#pragma unroll
  for (int s = 0; s < Shape::kSlices; s += Shape::kGroups) {
    const int slice = s + group;
    uint32_t b[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if constexpr (kMajorN) {
        const int k = slice * 16 + lane % 16, v = (column % 64 + n * 16) / 8 + lane / 16;
        device::load_matrices_transposed(b[n], weights + (column / 64 * 64 + k) * 128 + ((v ^ (k & 7)) << 4));
      } else {
        const int row = column + n * 16 + lane / 16 * 8 + lane % 8, v = slice * 2 + lane / 8 % 2;
        device::load_matrices(b[n], weights + row * 128 + ((v ^ (row & 7)) << 4));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) round_operand<T>(b[n][i]);
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      uint32_t a[4];
      device::load_matrices(a, rows[m] ^ (slice * 2 + lane / 16) << 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) round_operand<T>(a[i]);
      const uint4 rounded = {a[0], a[1], a[2], a[3]};
#pragma unroll
      for (int n = 0; n < 4; ++n)
        device::mma(T{}, sums[m][n], rounded, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
  }
}

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

template <class T, class Shape, bool kMajorN>
DPA_DEVICE void sum_tile(const MmaArgs& args, const MmaTile& tile) {
  const ConvPlan& plan = args.plan.conv;
  const int thread = device::thread(), warp = thread / 32, lane = thread % 32;
  const int column = warp % Shape::kColumnWarps * 32, row_warp = warp / Shape::kColumnWarps % Shape::kRowWarps;
  const int group = warp / (Shape::kColumnWarps * Shape::kRowWarps);
  const int before = tile.first_time * plan.stride + plan.lowest, first_time = before > 0 ? before : 0;
  const int terms = plan.terms[tile.phase], steps = terms * plan.chunks, boxes = args.plan.boxes;
  const int first_term = plan.first_term[row_warp], end_term = plan.end_term[row_warp];
  const uint32_t zeros = device::shared_address(device::shared()), memory = zeros + 128;
  const uint32_t box_bytes = args.plan.box_times * plan.rows.samples * 128, weights = memory + boxes * box_bytes;
  if (thread < 32) reinterpret_cast<uint32_t*>(device::shared())[thread] = 0;

  const BoxCopies<T> box_copies(args, tile, first_time);
  const WeightCopies<T, Shape, kMajorN> weight_copies(args);
  const LaneRows lane_rows(plan, tile, first_time, row_warp * 64);
  float sums[4][4][4] = {};

  // What is loaded next: a step's weights, and the box of a chunk.
  int load_term = 0, load_chunk = 0, load_stage = 0, load_box = 0;
  const auto load_weights = [&] {
    if (load_chunk < plan.chunks)
      weight_copies.load(args, tile, plan.tap[tile.phase][load_term], load_chunk,
                         weights + load_stage * Shape::kWeightBytes);
    if (++load_term == terms) load_term = 0, ++load_chunk;
    if (++load_stage == Shape::kStages) load_stage = 0;
  };
#pragma unroll 1
  for (; load_box < boxes - 1; ++load_box)
    if (load_box < plan.chunks) box_copies.load(args, load_box, memory + load_box * box_bytes);
#pragma unroll 1
  for (int i = 0; i < Shape::kStages - 1; ++i) {
    load_weights();
    device::copies_commit();
  }

  int term = 0, stage = 0, box = 0, next_box = boxes - 1;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    device::copies_wait<Shape::kStages - 2>();
    device::sync_block();
    if (term == 0) {
      if (load_box < plan.chunks) box_copies.load(args, load_box, memory + next_box * box_bytes);
      ++load_box;
      if (++next_box == boxes) next_box = 0;
    }
    load_weights();
    device::copies_commit();
    if (term >= first_term && term < end_term) {
      const int shift = plan.shift[tile.phase][term];
      const uint32_t at = memory + box * box_bytes;
      uint32_t rows[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int row = lane_rows.box[m] + shift * plan.rows.samples;
        const bool inside = static_cast<uint32_t>(lane_rows.time[m] + shift) < static_cast<uint32_t>(args.in_length);
        rows[m] = inside ? at + row * 128 + ((row & 7) << 4) : zeros;
      }
      multiply_step<T, Shape, kMajorN>(sums, rows, weights + stage * Shape::kWeightBytes, group, column);
    }
    if (++stage == Shape::kStages) stage = 0;
    if (++term == terms) {
      term = 0;
      if (++box == boxes) box = 0;
    }
  }
  device::copies_wait<0>();
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
