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
  int64_t y_rows, y_length, x_length, batch;
  int64_t y_channels, x_channels, y_pitch, x_width;  // of rows, in elements
  int taps, stride, padding;
  const void *y, *x;
  void* gradient;     // (d0, d1, taps), of float32 or of T; with splits
  float* partials;    // (splits, d0, d1, taps) instead
  bool float_gradient;
};

// Of a row (b, t): the bytes of its row of x at tap 0 from the box's start, and its time at tap 0.
struct RowPlace {
  int byte, time;
};

template <class T>
struct WgradStage {
  static constexpr int kRows = 64 / kSize<T>, kYPitch = wgrad_pitch(kWgradYChannels, kSize<T>);
  static constexpr int kXAt = kRows * (kYPitch + static_cast<int>(sizeof(RowPlace)));  // behind y and the table
};

struct WgradTile {
  int64_t first_y, first_x, first_step, steps;
  int split;
};

// A block's loads of one step.
template <class T>
DPA_DEVICE void load_rows(const MmaWgradArgs& args, const WgradTile& tile, int64_t step, uint8_t* stage, int x_pitch) {
  using Stage = WgradStage<T>;
  const int thread = device::thread();
  const uint32_t to = device::shared_address(stage);
  const int64_t first = step * Stage::kRows;
  const auto x_row = [&](int64_t row) {  // at tap 0, perhaps before the tensor or in another sample
    const int64_t sample = row / args.y_length;
    return sample * args.x_length + (row - sample * args.y_length) * args.stride - args.padding;
  };
  const int64_t x_at = x_row(first), first_x_row = x_at > 0 ? x_at : 0;
  constexpr int kYVectors = kWgradYChannels * kSize<T> / 16;
  const int y_vectors = static_cast<int>((padded_channels(args.y_channels) - tile.first_y) * kSize<T> / 16);
#pragma unroll
  for (int i = 0; i < Stage::kRows * kYVectors / kMmaThreads; ++i) {
    const int n = thread + i * kMmaThreads, row = n / kYVectors, v = n % kYVectors;
    const bool inside = first + row < args.y_rows && v < y_vectors;
    const int64_t at = inside ? ((first + row) * args.y_pitch + tile.first_y) * kSize<T> + v * 16 : 0;
    device::copy_16_or_zeros(to + row * Stage::kYPitch + v * 16, static_cast<const uint8_t*>(args.y) + at, inside);
  }
  const int vectors = args.plan.x_channels * kSize<T> / 16, shift = vectors == 4 ? 2 : vectors == 8 ? 3 : vectors == 16 ? 4 : 5;
  const int x_vectors = static_cast<int>((padded_channels(args.x_channels) - tile.first_x) * kSize<T> / 16);
  const int64_t x_rows = args.batch * args.x_length;
#pragma unroll 1
  for (int n = thread; n < args.plan.box_rows << shift; n += kMmaThreads) {
    const int row = n >> shift, v = n & (vectors - 1);
    const bool inside = first_x_row + row < x_rows && v < x_vectors;
    const int64_t at = inside ? ((first_x_row + row) * args.x_width + tile.first_x) * kSize<T> + v * 16 : 0;
    device::copy_16_or_zeros(to + Stage::kXAt + row * x_pitch + v * 16, static_cast<const uint8_t*>(args.x) + at,
                             inside);
  }
  if (thread < Stage::kRows) {
    const int64_t row = first + thread;
    RowPlace place{0, INT32_MIN / 2};
    if (row < args.y_rows)
      place = {static_cast<int>(x_row(row) - first_x_row) * x_pitch,
               static_cast<int>(row % args.y_length) * args.stride - args.padding};
    reinterpret_cast<RowPlace*>(stage + Stage::kRows * Stage::kYPitch)[thread] = place;
  }
}

// Where a tap's row of x begins, or the zeros.
DPA_DEVICE uint32_t row_at(const RowPlace& place, int tap, uint32_t x, int x_pitch, int64_t x_length, uint32_t zeros) {
  const bool inside = static_cast<uint32_t>(place.time + tap) < static_cast<uint32_t>(x_length);
  return inside ? x + place.byte + tap * x_pitch : zeros;
}

// A warp's MMAs of one step, in 16 bits: rows of both operands run along M and N.
template <class T, int kSlots>
DPA_DEVICE void multiply_rows(float (&sums)[2][kSlots][2][4], const uint8_t* stage, int y_channel, int x_channel,
                              const MmaWgradArgs& args, int x_pitch, uint32_t zeros) {
  using Stage = WgradStage<T>;
  const int lane = device::thread() % 32;
  const uint32_t y = device::shared_address(stage), x = y + Stage::kXAt;
  const auto* places = reinterpret_cast<const RowPlace*>(stage + Stage::kRows * Stage::kYPitch);
  if constexpr (!kIsFloat<T>) {
#pragma unroll
    for (int k = 0; k < Stage::kRows; k += 16) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        device::load_matrices_transposed(a[m], y + (k + lane / 16 * 8 + lane % 8) * Stage::kYPitch +
                                                   (y_channel + m * 16 + lane / 8 % 2 * 8) * 2);
      const RowPlace place = places[k + lane % 16];
      int tap = 0, channel = x_channel + lane / 16 * 8;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        uint32_t b[4];
        device::load_matrices_transposed(b, row_at(place, tap, x, x_pitch, args.x_length, zeros) + channel * 2);
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
#pragma unroll
    for (int k = 0; k < Stage::kRows; k += 8) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[m][i] = device::load_shared_word(y + (k + row + i / 2 * 4) * Stage::kYPitch +
                                             (y_channel + m * 16 + i % 2 * 8 + column) * 4);
          round_operand<T>(a[m][i]);
        }
      const RowPlace near = places[k + row], far = places[k + row + 4];
      int tap = 0, channel = x_channel + column;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const uint32_t from[2] = {row_at(near, tap, x, x_pitch, args.x_length, zeros) + channel * 4,
                                  row_at(far, tap, x, x_pitch, args.x_length, zeros) + channel * 4};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          uint32_t b[2] = {device::load_shared_word(from[0] + n * 32), device::load_shared_word(from[1] + n * 32)};
          round_operand<T>(b[0]), round_operand<T>(b[1]);
#pragma unroll
          for (int m = 0; m < 2; ++m)
            device::mma(T{}, sums[m][slot][n], {a[m][0], a[m][1], a[m][2], a[m][3]}, b[0], b[1]);
        }
        if (++tap == args.taps) tap = 0, channel += 16;
      }
    }
  }
}

// Stores half of the tile's channels i, which the tile of sums holds.
template <class T>
DPA_DEVICE void store_channels(const MmaWgradArgs& args, const WgradTile& tile, const float* sums, int row_words,
                               int64_t first_y) {
  const int64_t whole = args.x_channels * args.taps, left = (args.x_channels - tile.first_x) * args.taps;
  const int elements = static_cast<int>(left < args.plan.x_channels * args.taps ? left : args.plan.x_channels * args.taps);
  const int warp = device::thread() / 32, lane = device::thread() % 32;
  const bool to_floats = args.partials || args.float_gradient;
  float* const floats = args.partials ? args.partials + tile.split * args.y_channels * whole
                                      : static_cast<float*>(args.gradient);
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
DPA_DEVICE WgradTile wgrad_tile(const MmaWgradArgs& args, int64_t index) {
  const MmaWgradPlan& plan = args.plan;
  WgradTile tile;
  tile.split = static_cast<int>(index % plan.splits), index /= plan.splits;
  tile.first_x = index % plan.x_tiles * plan.x_channels;
  tile.first_y = index / plan.x_tiles * kWgradYChannels;
  tile.first_step = plan.steps * tile.split / plan.splits;
  tile.steps = plan.steps * (tile.split + 1) / plan.splits - tile.first_step;
  return tile;
}

// Every thread of the block calls it.
template <class T, int kSlots>
DPA_DEVICE void wgrad_block(const MmaWgradArgs& args, const WgradTile& tile) {
  using Stage = WgradStage<T>;
  const int warp = device::thread() / 32, lane = device::thread() % 32;
  const int y_channel = warp % 4 * 32, x_half = args.plan.x_channels / 2, x_channel = warp / 4 * x_half;
  const int x_pitch = args.plan.x_pitch;
  const int stage_bytes = Stage::kXAt + args.plan.box_rows * x_pitch, zeros_bytes = (x_pitch + 127) / 128 * 128;
  uint8_t* const stages = device::shared() + zeros_bytes;
  const uint32_t zeros = device::shared_address(device::shared());
  for (int i = device::thread(); i < zeros_bytes / 4; i += kMmaThreads)
    reinterpret_cast<uint32_t*>(device::shared())[i] = 0;
  float sums[2][kSlots][2][4] = {};
#pragma unroll 1
  for (int i = 0; i < kMmaWgradStages - 1; ++i) {
    if (i < tile.steps) load_rows<T>(args, tile, tile.first_step + i, stages + i * stage_bytes, x_pitch);
    device::copies_commit();
  }
  int at = 0, next = kMmaWgradStages - 1;
#pragma unroll 1
  for (int64_t step = 0; step < tile.steps; ++step) {
    device::copies_wait<kMmaWgradStages - 2>();
    device::sync_block();
    if (step + kMmaWgradStages - 1 < tile.steps)
      load_rows<T>(args, tile, tile.first_step + step + kMmaWgradStages - 1, stages + next * stage_bytes, x_pitch);
    device::copies_commit();
    multiply_rows<T, kSlots>(sums, stages + at * stage_bytes, y_channel, x_channel, args, x_pitch, zeros);
    if (++at == kMmaWgradStages) at = 0;
    if (++next == kMmaWgradStages) next = 0;
  }
  device::copies_wait<0>();
  // The tile of sums takes the stages' place, half of the channels i at a time: rows in the gradient's order.
  float* const tile_sums = reinterpret_cast<float*>(stages);
  const int row_words = args.plan.x_channels * args.taps + 8;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    device::sync_block();
    if (y_channel / 64 == half) {
      int tap = 0, channel = x_channel + lane % 4 * 2;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              tile_sums[(y_channel % 64 + m * 16 + i / 2 * 8 + lane / 4) * row_words +
                        (channel + n * 8 + i % 2) * args.taps + tap] = sums[m][slot][n][i];
        if (++tap == args.taps) tap = 0, channel += 16;
      }
    }
    device::sync_block();
    store_channels<T>(args, tile, tile_sums, row_words, tile.first_y + half * 64);
  }
}

}  // namespace dpa::kernels::conv1d
