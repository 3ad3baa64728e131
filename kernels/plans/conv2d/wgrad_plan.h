// The weight's gradient of a convolution of images in TF32: sizes, whether and how (kernels/cuda/conv2d/wgrad.cu).
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/plans/conv1d/plan.h"

namespace dpa::kernels::conv2d {

/// x and y, the images that a convolution of 3 x 3 maps to each other, are (batch, height, width, channels) in float32.
struct ImageWgrad {
  int64_t batch;
  int64_t x_channels, x_height, x_width;
  int64_t y_channels, y_height, y_width;
  int stride, padding;
};
constexpr int kWgradTaps = 3;  // each way

struct ImageWgradPlan {
  conv1d::WgradPlan tiles;  // of the gradient's rows (filter row, y channel), and of its columns (x channel, tap)
  int wide, high;           // steps along a row of y, rows of y that a tile meets
  int64_t steps;
  int parts;  // sums of steps that blocks leave for each tile
};

constexpr int64_t kMostWgradTiles = 32;  // with more, cuDNN's is as fast (docs/training-log.md)

/// Tiles of 128 channels of y in one row of the filter; or, at a stride of one, of 64 channels in two rows of it, which
/// meet the same x in neighbouring rows of y.
inline bool serves(const ImageWgrad& conv) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const bool sizes = conv.batch > 0 && conv.y_height > 0 && conv.y_width > 0 &&
                     conv.batch * conv.x_height * conv.x_width < kMost && conv.x_channels < kMost / 16 &&
                     conv.y_channels < kMost / 16 / conv.x_channels;
  return sizes && conv.x_channels % 32 == 0 && conv.y_channels % (conv.stride == 1 ? 64 : 128) == 0 &&
         (conv.stride == 1 || conv.stride == 2) && conv.padding < kWgradTaps;
}

inline ImageWgradPlan image_wgrad_plan(const ImageWgrad& conv, int multiprocessors) {
  ImageWgradPlan plan{};
  const int64_t samples = conv1d::ceil_div(conv.batch, conv1d::kTf32Samples);
  plan.wide = static_cast<int>(conv1d::ceil_div(conv.y_width, conv1d::kTf32Times));
  plan.high = static_cast<int>(conv.y_height) + (conv.y_channels % conv1d::kTileRows != 0);
  plan.steps = samples * plan.high * plan.wide;
  plan.tiles.height = 1, plan.tiles.splits = 1, plan.tiles.x_channels = 64;
  plan.tiles.y_tiles = conv1d::ceil_div(kWgradTaps * conv.y_channels, conv1d::kTileRows);
  plan.tiles.x_tiles = conv1d::ceil_div(conv.x_channels, plan.tiles.x_channels);
  // The least steps that the device takes one after the other; a block's prologue and epilogue are as long as some.
  constexpr int64_t kBlock = 12, kMostParts = 128;
  const int64_t tiles = plan.tiles.y_tiles * plan.tiles.x_tiles;
  int64_t least = INT64_MAX;
  for (int64_t parts = 1; parts <= std::min(kMostParts, plan.steps); ++parts) {
    const int64_t rounds = conv1d::ceil_div(tiles * parts, multiprocessors);
    if (const int64_t time = rounds * (conv1d::ceil_div(plan.steps, parts) + kBlock); time < least)
      least = time, plan.parts = static_cast<int>(parts);
    if (rounds > 4) break;
  }
  return plan;
}

}  // namespace dpa::kernels::conv2d
