// The kernel of mma_wgrad.cu: gradient[i, j, k] = sum over b, t of y[b, t, i] x[b, stride t + k - padding, j]
//
// A block: four warps of 32 channels i each, times two of columns. A warp's columns are kSlots times sixteen channels
// j of one tap. A step contracts rows (b, t) as they lie in memory, across samples; of x it loads the rows that they
// meet, and a table says where each tap's begin, or that they are padding.
#pragma once
#include "kernels/cuda/conv1d/mma_device.cuh"
#include "kernels/plans/conv1d/mma_plan.h"

namespace dpa::kernels::conv1d {

struct MmaWgradArgs {
  MmaWgradPlan plan;
  int y_rows, x_rows, y_length, x_length;  // rows of all samples, and of one
  int y_channels, x_channels;
  int first_channels;                    // of x, of the first of two tensors, or all
  int64_t y_width, x_width, more_width;  // of rows, in elements
  int taps, stride, padding;
  const void *y, *x, *more;
  void* gradient;   // (d0, d1, taps), of float32 or of T
  float* partials;  // with splits (splits, d0, d1, taps) instead
  bool float_gradient;
};

// Of a row (b, t): the bytes of its row of x at tap 0 from the box's start, and its time at tap 0.
struct RowPlace {
  int byte, time;
};

template <class T, int kSlots>
struct WgradStage {
  static constexpr int kStages = wgrad_stages(kSlots), kRows = wgrad_rows(kSlots, kSize<T>),
                       kYPitch = wgrad_pitch(kWgradYChannels, kSize<T>);
  static constexpr int kXAt = kRows * (kYPitch + static_cast<int>(sizeof(RowPlace)));  // behind y and the table
};

struct WgradTile {
  int first_y, first_x, first_step, steps;
  int split;
};

// Of a row of y, its row of x at tap 0: perhaps before the tensor, or in another sample.
struct XRow {
  int time, x, x_time;  // the row's time; row and time of x

  DPA_DEVICE XRow(const MmaWgradArgs& args, int y_row) {
    const int sample = static_cast<unsigned>(y_row) / static_cast<unsigned>(args.y_length);
    time = y_row - sample * args.y_length;
    x_time = time * args.stride - args.padding;
    x = sample * args.x_length + x_time;
  }
  // To the row of the next step.
  DPA_DEVICE void advance(const MmaWgradArgs& args) {
    time += args.plan.step_times, x += args.plan.step_x, x_time += args.plan.step_times * args.stride;
    if (time < args.y_length) return;
    time -= args.y_length, x_time -= args.y_length * args.stride;
    x += args.x_length - args.y_length * args.stride;
  }
};

// A block's loads of the steps, one after the other.
template <class T, int kSlots>
struct RowLoads {
  using Stage = WgradStage<T, kSlots>;
  static constexpr int kYVectors = kWgradYChannels * kSize<T> / 16, kYStep = kMmaThreads / kYVectors;

  int rows_left;    // of y from the next step on
  XRow first, own;  // the step's first row, and the thread's of the table
  const uint8_t *y, *x;
  int64_t x_bytes;  // of a row
  uint32_t y_to, x_to;
  int x_row;

  DPA_DEVICE RowLoads(const MmaWgradArgs& args, const WgradTile& tile)
      : rows_left(args.y_rows - tile.first_step * Stage::kRows),
        first(args, tile.first_step * Stage::kRows),
        own(args, tile.first_step * Stage::kRows + device::thread() % Stage::kRows) {
    const int thread = device::thread(), y_row = thread / kYVectors, y_vector = thread % kYVectors;
    const int shift = args.plan.x_shift, x_vector = thread & ((1 << shift) - 1);
    x_row = thread >> shift;
    // Channels that are not there are read from the first ones: they meet sums that nobody stores.
    const bool y_inside = y_vector * (16 / kSize<T>) < args.y_channels - tile.first_y;
    const bool x_inside = x_vector * (16 / kSize<T>) < args.x_channels - tile.first_x;
    const int x_channel = tile.first_x + (x_inside ? x_vector * (16 / kSize<T>) : 0);
    const bool of_more = x_channel >= args.first_channels;
    y = static_cast<const uint8_t*>(args.y) + (tile.first_y + (y_inside ? y_vector * (16 / kSize<T>) : 0)) * kSize<T> +
        (int64_t{tile.first_step} * Stage::kRows + y_row) * (args.y_width * kSize<T>);
    x = static_cast<const uint8_t*>(of_more ? args.more : args.x) +
        (of_more ? x_channel - args.first_channels : x_channel) * kSize<T>;
    x_bytes = (of_more ? args.more_width : args.x_width) * kSize<T>;
    y_to = y_row * Stage::kYPitch + y_vector * 16;
    x_to = Stage::kXAt + x_row * args.plan.x_pitch + x_vector * 16;
  }
  DPA_DEVICE void load(const MmaWgradArgs& args, uint8_t* stage) {
    const uint32_t to = device::shared_address(stage);
    const int64_t y_bytes = args.y_width * kSize<T>;
    const int y_row = device::thread() / kYVectors;
#pragma unroll
    for (int row = 0; row < Stage::kRows; row += kYStep) {
      const bool inside = y_row + row < rows_left;
      device::copy_async_16_or_zeros(to + y_to + row * Stage::kYPitch, inside ? y + row * y_bytes : args.y, inside);
    }
    const int first_x = first.x > 0 ? first.x : 0, rows = kMmaThreads >> args.plan.x_shift;
    uint32_t at = to + x_to;
#pragma unroll 1
    for (int row = x_row; row < args.plan.box_rows; row += rows, at += rows * args.plan.x_pitch) {
      const bool inside = first_x + row < args.x_rows;
      device::copy_async_16_or_zeros(at, inside ? x + (first_x + row) * x_bytes : x, inside);
    }
    if (device::thread() < Stage::kRows)
      reinterpret_cast<RowPlace*>(stage + Stage::kRows * Stage::kYPitch)[device::thread()] = {
          (own.x - first_x) * args.plan.x_pitch, device::thread() < rows_left ? own.x_time : INT32_MIN / 2};
    rows_left -= Stage::kRows, y += Stage::kRows * y_bytes;
    first.advance(args), own.advance(args);
  }
};

// Where a tap's row of x begins, or the zeros.
DPA_DEVICE uint32_t row_at(const RowPlace& place, int tap, uint32_t x, int x_pitch, int x_length, uint32_t zeros) {
  const bool inside = static_cast<uint32_t>(place.time + tap) < static_cast<uint32_t>(x_length);
  return inside ? x + place.byte + tap * x_pitch : zeros;
}

// A warp's MMAs of one step: rows of both operands run along M and N. In full, the sum of eight rows is one of its own,
// as in mma_convolution.cuh.
template <class T, int kSlots, bool kInFull>
DPA_DEVICE void multiply_rows(float (&sums)[2][kSlots][2][4], const uint8_t* stage, int y_channel, int x_channel,
                              const MmaWgradArgs& args, int x_pitch, uint32_t zeros) {
  using Stage = WgradStage<T, kSlots>;
  const int lane = device::thread() % 32;
  const uint32_t y = device::shared_address(stage), x = y + Stage::kXAt;
  const auto* places = reinterpret_cast<const RowPlace*>(stage + Stage::kRows * Stage::kYPitch);
  if constexpr (!kIsFloat<T>) {
#pragma unroll 1
    for (int k = 0; k < Stage::kRows; k += 16) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        device::load_matrix_x4_transposed(
            a[m], y + (k + lane / 16 * 8 + lane % 8) * Stage::kYPitch + (y_channel + m * 16 + lane / 8 % 2 * 8) * 2);
      const RowPlace place = places[k + lane % 16];
      int tap = 0, channel = x_channel + lane / 16 * 8;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        uint32_t b[4];
        device::load_matrix_x4_transposed(b, row_at(place, tap, x, x_pitch, args.x_length, zeros) + channel * 2);
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int n = 0; n < 2; ++n)
            device::mma(T{}, sums[m][slot][n], {a[m][0], a[m][1], a[m][2], a[m][3]}, b[n * 2], b[n * 2 + 1]);
        if (++tap == args.taps) tap = 0, channel += 16;
      }
    }
  } else {
    const int row = lane % 4, column = lane / 4;
#pragma unroll 1
    for (int k = 0; k < Stage::kRows; k += 8) {
      uint32_t a[2][4], a_rest[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          split_operand(device::load_shared_word(y + (k + row + i / 2 * 4) * Stage::kYPitch +
                                                 (y_channel + m * 16 + i % 2 * 8 + column) * 4),
                        a[m][i], a_rest[m][i]);
      const RowPlace near = places[k + row], far = places[k + row + 4];
      int tap = 0, channel = x_channel + column;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const uint32_t from[2] = {row_at(near, tap, x, x_pitch, args.x_length, zeros) + channel * 4,
                                  row_at(far, tap, x, x_pitch, args.x_length, zeros) + channel * 4};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          uint32_t b[2], b_rest[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) split_operand(device::load_shared_word(from[i] + n * 32), b[i], b_rest[i]);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const uint4 first = {a[m][0], a[m][1], a[m][2], a[m][3]};
            if constexpr (kInFull) {
              float sum[4] = {};
              device::mma(T{}, sum, {a_rest[m][0], a_rest[m][1], a_rest[m][2], a_rest[m][3]}, b[0], b[1]);
              device::mma(T{}, sum, first, b_rest[0], b_rest[1]);
              device::mma(T{}, sum, first, b[0], b[1]);
#pragma unroll
              for (int e = 0; e < 4; ++e) sums[m][slot][n][e] += sum[e];
            } else {
              device::mma(T{}, sums[m][slot][n], first, b[0], b[1]);
            }
          }
        }
        if (++tap == args.taps) tap = 0, channel += 16;
      }
    }
  }
}

// Stores half of the tile's channels i, which the tile of sums holds.
template <class T>
DPA_DEVICE void store_channels(const MmaWgradArgs& args, const WgradTile& tile, const float* sums, int row_words,
                               int first_y) {
  const int64_t whole = int64_t{args.x_channels} * args.taps;
  const int left = args.x_channels - tile.first_x, channels = args.plan.x_channels;
  const int elements = (left < channels ? left : channels) * args.taps;
  const int warp = device::thread() / 32, lane = device::thread() % 32;
  const bool to_floats = args.partials || args.float_gradient;
  float* const floats =
      args.partials ? args.partials + tile.split * (args.y_channels * whole) : static_cast<float*>(args.gradient);
#pragma unroll 1
  for (int row = warp; row < kWgradYChannels / 2 && first_y + row < args.y_channels; row += kMmaThreads / 32) {
    const int64_t to = (first_y + row) * whole + tile.first_x * args.taps;
    const float* const from = sums + row * row_words;
    if (to_floats && args.x_channels % 4 == 0) {
#pragma unroll 1
      for (int e = lane * 4; e < elements; e += 128)
        *reinterpret_cast<float4*>(floats + to + e) = *reinterpret_cast<const float4*>(from + e);
    } else {
#pragma unroll 1
      for (int e = lane; e < elements; e += 32) {
        if (to_floats)
          floats[to + e] = from[e];
        else
          store_rounded<T>(args.gradient, to + e, from[e]);
      }
    }
  }
}

// The tile of a block.
DPA_DEVICE WgradTile wgrad_tile(const MmaWgradArgs& args, unsigned index) {
  const MmaWgradPlan& plan = args.plan;
  const unsigned splits = plan.splits, x_tiles = static_cast<unsigned>(plan.x_tiles);
  WgradTile tile;
  tile.split = index % splits, index /= splits;
  tile.first_x = index % x_tiles * plan.x_channels;
  tile.first_y = index / x_tiles * kWgradYChannels;
  tile.first_step = static_cast<int>(plan.steps * tile.split / plan.splits);
  tile.steps = static_cast<int>(plan.steps * (tile.split + 1) / plan.splits) - tile.first_step;
  return tile;
}

// Every thread of the block calls it.
template <class T, int kSlots, bool kInFull = false>
DPA_DEVICE void wgrad_block(const MmaWgradArgs& args, const WgradTile& tile) {
  using Stage = WgradStage<T, kSlots>;
  const int warp = device::thread() / 32, lane = device::thread() % 32;
  const int y_channel = warp % 4 * 32, x_half = args.plan.x_channels / 2, x_channel = warp / 4 * x_half;
  const int x_pitch = args.plan.x_pitch;
  const int stage_bytes = Stage::kXAt + args.plan.box_rows * x_pitch, zeros_bytes = (x_pitch + 127) / 128 * 128;
  uint8_t* const stages = device::shared() + zeros_bytes;
  const uint32_t zeros = device::shared_address(device::shared());
  for (int i = device::thread(); i < zeros_bytes / 4; i += kMmaThreads)
    reinterpret_cast<uint32_t*>(device::shared())[i] = 0;
  RowLoads<T, kSlots> loads(args, tile);
  float sums[2][kSlots][2][4] = {};
#pragma unroll 1
  for (int i = 0; i < Stage::kStages - 1; ++i) {
    if (i < tile.steps) loads.load(args, stages + i * stage_bytes);
    device::copy_async_commit();
  }
  int at = 0, next = Stage::kStages - 1;
#pragma unroll 1
  for (int step = 0; step < tile.steps; ++step) {
    device::copy_async_wait<Stage::kStages - 2>();
    device::sync_block();
    if (step + Stage::kStages - 1 < tile.steps) loads.load(args, stages + next * stage_bytes);
    device::copy_async_commit();
    multiply_rows<T, kSlots, kInFull>(sums, stages + at * stage_bytes, y_channel, x_channel, args, x_pitch, zeros);
    if (++at == Stage::kStages) at = 0;
    if (++next == Stage::kStages) next = 0;
  }
  device::copy_async_wait<0>();
  // The tile of sums takes the stages' place, half of the channels i at a time: rows in the gradient's order.
  float* const tile_sums = reinterpret_cast<float*>(stages);
  const int row_words = args.plan.x_channels * args.taps + 8;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    device::sync_block();
    if (y_channel / 64 == half) {
      // Held, so that no address is computed before the loop: there are as many as sums.
      const int taps = device::held(args.taps), words = device::held(row_words);
      int tap = 0, channel = x_channel + lane % 4 * 2;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              tile_sums[(y_channel % 64 + m * 16 + i / 2 * 8 + lane / 4) * words + (channel + n * 8 + i % 2) * taps +
                        tap] = sums[m][slot][n][i];
        if (++tap == taps) tap = 0, channel += 16;
      }
    }
    device::sync_block();
    store_channels<T>(args, tile, tile_sums, row_words, tile.first_y + half * 64);
  }
}

}  // namespace dpa::kernels::conv1d
