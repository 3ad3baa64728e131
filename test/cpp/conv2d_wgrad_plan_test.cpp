// The plan of a weight's gradient of images: steps and tiles cover all, parts have work, and sizes that no tile holds are
// refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/plans/conv2d/wgrad_plan.h"

namespace dpa::kernels::conv2d {
namespace {

ImageWgrad convolution(int64_t batch, int64_t x_channels, int64_t y_channels, int64_t height, int64_t width, int stride,
                       int padding = 1) {
  const auto extent = [&](int64_t n) { return (n + 2 * padding - kWgradTaps) / stride + 1; };
  return {batch, x_channels, height, width, y_channels, extent(height), extent(width), stride, padding};
}

std::vector<ImageWgrad> convolutions() {
  std::vector<ImageWgrad> all;
  for (int64_t batch : {1, 8, 17, 128})
    for (int64_t size : {3, 21, 120})
      for (int64_t x_channels : {32, 64, 160, 256})
        for (int64_t y_channels : {64, 128, 192, 256})
          for (int stride : {1, 2}) all.push_back(convolution(batch, x_channels, y_channels, size, size + 1, stride));
  return all;
}

TEST(ImageWgradPlan, StepsAndTilesCoverAll) {
  for (const auto& conv : convolutions()) {
    if (!serves(conv)) continue;
    for (int multiprocessors : {16, 82, 132}) {
      const ImageWgradPlan plan = image_wgrad_plan(conv, multiprocessors);
      EXPECT_GE(plan.wide * conv1d::kTf32Times, conv.y_width);
      EXPECT_LT((plan.wide - 1) * conv1d::kTf32Times, conv.y_width);
      // Where a tile has two rows of the filter, the second one's last row of y is one step further.
      const bool two_rows = conv.y_channels % conv1d::kTileRows != 0;
      EXPECT_EQ(plan.high, conv.y_height + two_rows);
      EXPECT_EQ(plan.steps % (plan.high * plan.wide), 0);
      EXPECT_GE(plan.steps / (plan.high * plan.wide) * conv1d::kTf32Samples, conv.batch);
      EXPECT_GE(plan.tiles.y_tiles * conv1d::kTileRows, kWgradTaps * conv.y_channels);
      EXPECT_GE(plan.tiles.x_tiles * plan.tiles.x_channels, conv.x_channels);
      EXPECT_EQ(plan.tiles.splits, 1);
      EXPECT_GE(plan.parts, 1);
      EXPECT_LE(plan.parts, plan.steps);  // each part leaves sums
    }
  }
}

TEST(ImageWgradPlan, TilesHaveTwoRowsOfTheFilterAtMost) {
  for (const auto& conv : convolutions()) {
    if (!serves(conv)) continue;
    for (int64_t first = 0; first < kWgradTaps * conv.y_channels; first += conv1d::kTileRows) {
      const int64_t last = std::min(first + conv1d::kTileRows, kWgradTaps * conv.y_channels) - 1;
      const int64_t rows = last / conv.y_channels - first / conv.y_channels + 1;
      EXPECT_LE(rows, conv.stride == 1 ? 2 : 1);
      EXPECT_EQ(conv.y_channels % 32, 0);  // a box of y lies in one row of the filter
    }
  }
}

TEST(ImageWgradPlan, SizesThatNoTileHoldsAreRefused) {
  EXPECT_TRUE(serves(convolution(8, 64, 64, 12, 16, 1)));
  EXPECT_TRUE(serves(convolution(8, 64, 128, 12, 16, 2)));
  EXPECT_FALSE(serves(convolution(8, 48, 64, 12, 16, 1)));
  EXPECT_FALSE(serves(convolution(8, 64, 96, 12, 16, 1)));
  EXPECT_FALSE(serves(convolution(8, 64, 64, 12, 16, 2)));
  EXPECT_FALSE(serves(convolution(8, 64, 128, 12, 16, 3)));
  EXPECT_FALSE(serves(convolution(8, 64, 128, 12, 16, 1, 3)));
  EXPECT_FALSE(serves(convolution(0, 64, 128, 12, 16, 1)));
}

TEST(ImageWgradPlan, FewTilesHaveManyParts) {
  const ImageWgrad first = convolution(16, 64, 64, 120, 160, 1), last = convolution(16, 256, 256, 30, 40, 1);
  const auto blocks = [](const ImageWgrad& conv) {
    const ImageWgradPlan plan = image_wgrad_plan(conv, 132);
    return plan.tiles.y_tiles * plan.tiles.x_tiles * plan.parts;
  };
  EXPECT_EQ(blocks(first), 132);
  EXPECT_EQ(blocks(last), 120);
}

}  // namespace
}  // namespace dpa::kernels::conv2d
