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
  int batch, in_length, out_length, outputs, contracted;
  const void *x, *weights;
  uint32_t tap_vectors, row_vectors;  // of the packed weights: sixteen bytes of a tap, and of a row
};

// dgrad reads 16-bit weights as fprop does, and those of float32 transposed.
inline MmaArgs mma_args(const MmaPlan& plan, const Conv1d& conv, bool is_dgrad, const void* x, const void* weights) {
  const int64_t in = is_dgrad ? conv.y_channels : conv.x_channels, out = is_dgrad ? conv.x_channels : conv.y_channels;
  const bool by_out = is_dgrad && conv.dtype != DType::kFloat32;  // rows of the packed weights
  const int64_t row = padded(by_out ? out : in) / (conv.dtype == DType::kFloat32 ? 4 : 8), rows = by_out ? in : out;
  return {plan,
          static_cast<int>(conv.batch),
          static_cast<int>(is_dgrad ? conv.y_length : conv.x_length),
          static_cast<int>(is_dgrad ? conv.x_length : conv.y_length),
          static_cast<int>(out),
          static_cast<int>(in),
          x,
          weights,
          static_cast<uint32_t>(rows * row),
          static_cast<uint32_t>(row)};
}

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
    vectors = static_cast<int>(padded_channels(args.contracted)) * kSize<T> / 16;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = device::thread() / 8 + i * (kMmaThreads / 8);
      const int time = row / samples, sample = tile.first_sample + row - time * samples;
      const bool there =
          time < args.plan.box_times && sample < args.batch && first_time + time < args.in_length;
      from[i] = there ? static_cast<uint32_t>(sample * args.in_length + first_time + time) * vectors : kNone;
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
                               x + (uint64_t{from[i]} + (inside ? at : 0)) * 16, inside);
    }
  }
};

// A thread's copies of the weights of a step: `tap_vectors` and `row_vectors` are sixteen bytes each, of the packed form.
template <class T, class Shape, bool kMajorN>
DPA_DEVICE void load_weights(const MmaArgs& args, int first_column, int tap, int chunk, uint32_t to) {
  constexpr int kCopies = Shape::kColumns * 8 / kMmaThreads;
  const uint32_t tap_at = tap * args.tap_vectors;
  const auto* weights = static_cast<const uint8_t*>(args.weights);
  const int v = device::thread() % 8;
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int row = device::thread() / 8 + i * (kMmaThreads / 8);
    const int n = first_column + (kMajorN ? row / 64 * 64 + v * 8 : row);
    if (n >= args.outputs) continue;
    // Of the packed row, and sixteen bytes of it.
    const int packed_row = kMajorN ? chunk * 64 + row % 64 : n, vector = kMajorN ? n / 8 : chunk * 8 + v;
    const bool inside = kMajorN ? packed_row < args.contracted : vector < static_cast<int>(args.row_vectors);
    const uint32_t from = inside ? tap_at + packed_row * args.row_vectors + vector : 0;
    device::copy_16_or_zeros(to + row * 128 + ((v ^ (row & 7)) << 4), weights + uint64_t{from} * 16, inside);
  }
}

// A lane's rows of A: of the warp's four row tiles, 16 bytes of row lane % 16.
struct LaneRows {
  uint32_t box[2];     // two rows of the box each, at shift 0, as signed halves
  uint32_t inside[2];  // two tiles each: a bit a term, whether the row is no padding

  DPA_DEVICE LaneRows(const ConvPlan& plan, const MmaTile& tile, int first_time, int first_row, int in_length) {
    const int lane = device::thread() % 32;
    box[0] = box[1] = inside[0] = inside[1] = 0;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int row = first_row + m * 16 + lane % 16, j = row / plan.rows.samples, half = m % 2 * 16;
      if (j >= plan.rows.time) continue;
      const int time = (tile.first_time + j) * plan.stride;
      box[m / 2] |= static_cast<uint32_t>((time - first_time) * plan.rows.samples + row - j * plan.rows.samples & 0xffff)
                    << half;
      for (int i = 0; i < plan.terms[tile.phase]; ++i) {
        const int u = time + plan.shift[tile.phase][i];
        if (u >= 0 && u < in_length) inside[m / 2] |= 1u << (half + i);
      }
    }
  }
  DPA_DEVICE int row(int m) const { return static_cast<int16_t>(box[m / 2] >> m % 2 * 16); }
  DPA_DEVICE bool is_inside(int m, int term) const { return inside[m / 2] >> (m % 2 * 16 + term) & 1; }
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
  const int terms = plan.terms[tile.phase], boxes = args.plan.boxes;
  const int first_term = plan.first_term[row_warp], end_term = plan.end_term[row_warp];
  const uint32_t zeros = device::shared_address(device::shared()), memory = zeros + 128;
  const uint32_t box_bytes = args.plan.box_times * plan.rows.samples * 128, weights = memory + boxes * box_bytes;
  if (thread < 32) reinterpret_cast<uint32_t*>(device::shared())[thread] = 0;

  const BoxCopies<T> box_copies(args, tile, first_time);
  const LaneRows lane_rows(plan, tile, first_time, row_warp * 64, args.in_length);
  float sums[4][4][4] = {};

  // Which step's weights are loaded next. Their stage is the one before that which is multiplied.
  int load_term = 0, load_chunk = 0;
  const auto load_step = [&](int stage) {
    if (load_chunk < plan.chunks)
      load_weights<T, Shape, kMajorN>(args, tile.first_column, plan.tap[tile.phase][load_term], load_chunk,
                                      weights + stage * Shape::kWeightBytes);
    device::copies_commit();
    if (++load_term == terms) load_term = 0, ++load_chunk;
  };
#pragma unroll 1
  for (int i = 0; i < boxes - 1; ++i)
    if (i < plan.chunks) box_copies.load(args, i, memory + i * box_bytes);
#pragma unroll 1
  for (int i = 0; i < Shape::kStages - 1; ++i) load_step(i);

  int term = 0, chunk = 0, stage = 0, box = 0;
#pragma unroll 1
  while (chunk < plan.chunks) {
    device::copies_wait<Shape::kStages - 2>();
    device::sync_block();
    if (term == 0 && chunk + boxes - 1 < plan.chunks)
      box_copies.load(args, chunk + boxes - 1, memory + (box == 0 ? boxes - 1 : box - 1) * box_bytes);
    load_step(stage == 0 ? Shape::kStages - 1 : stage - 1);
    if (term >= first_term && term < end_term) {
      const int shifted = plan.shift[tile.phase][term] * plan.rows.samples;
      const uint32_t at = memory + box * box_bytes;
      uint32_t rows[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int row = lane_rows.row(m) + shifted;
        rows[m] = lane_rows.is_inside(m, term) ? at + row * 128 + ((row & 7) << 4) : zeros;
      }
      multiply_step<T, Shape, kMajorN>(sums, rows, weights + stage * Shape::kWeightBytes, group, column);
    }
    if (++stage == Shape::kStages) stage = 0;
    if (++term == terms) {
      term = 0, ++chunk;
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
