// The plan of a 2-D convolution: tiles cover every output once, groups and exchanges are counted right, what waits is
// resident.
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/plans/conv2d/plan.h"

namespace dpa::kernels::conv2d {
namespace {

const Device kHopper, kRtx3090 = {82, 100 << 10, 2}, kOrin = {16, 164 << 10, 2};

std::vector<Shape> shapes() {
  std::vector<Shape> made;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
    for (const int batch : {1, 2, 5})
      for (const int size : {1, 3, 11, 42, 120})
        for (const int channels : {24, 64, 512})
          for (const int groups : {0, 1, 4, channels / 8, channels})
            made.push_back(shape_of(dtype, batch, size, size + 2, 32, channels, 3, 1, 1, groups));
  return made;
}

TEST(Conv2dPlan, TilesCoverEveryOutputOnce) {
  for (const Shape& s : shapes())
    for (int tiling = 0; tiling < kNumTilings; tiling++) {
      ConvPlan p;
      if (!make_plan(s, tiling, 1, p)) continue;
      const Tiling& t = kTilings[tiling];
      EXPECT_GE(p.column_tiles * t.columns(), s.out_channels);
      EXPECT_LT((p.column_tiles - 1) * t.columns(), s.out_channels);
      const int samples = s.groups ? s.batch : 1;
      if (p.samples) {
        EXPECT_LE(p.samples * p.sample_rows, t.rows());
        EXPECT_EQ(p.row_tiles, (samples + p.samples - 1) / p.samples);
      } else {
        EXPECT_GE(p.tiles_per_sample * t.rows(), p.sample_rows);
        EXPECT_LT((p.tiles_per_sample - 1) * t.rows(), p.sample_rows);
        EXPECT_EQ(p.row_tiles, samples * p.tiles_per_sample);
      }
    }
}

TEST(Conv2dPlan, GroupsOfATileFitAndTheirSpanIsTheMost) {
  for (const Shape& s : shapes()) {
    if (!s.groups) continue;
    for (int tiling = 0; tiling < kNumTilings; tiling++) {
      ConvPlan p;
      if (!make_plan(s, tiling, 1, p)) continue;
      const int columns = kTilings[tiling].columns(), width = s.out_channels / s.groups;
      int span = 1;
      for (int g = 0; g < s.groups; g++)
        span = std::max(span, ((g + 1) * width - 1) / columns - g * width / columns + 1);
      EXPECT_EQ(p.span, span) << s.out_channels << " / " << s.groups << " tiling " << tiling;
      EXPECT_EQ(p.exchange, span > 1 || p.tiles_per_sample > 1);
      EXPECT_EQ(p.sub & (p.sub - 1), 0);  // kernels shift by it
      for (int c = 0; c < p.column_tiles; c++) {
        const int last = std::min((c + 1) * columns, s.out_channels) - 1;
        const int pairs = std::max(1, p.samples) * (last / width - c * columns / width + 1);
        EXPECT_LE(pairs * p.sub, std::max(kMaxPairs, kWarps));
      }
    }
  }
}

TEST(Conv2dPlan, BlocksThatWaitAreResident) {
  for (const Shape& s : shapes())
    for (const Device& d : {kHopper, kRtx3090, kOrin}) {
      const auto all = candidates(s, d);
      ASSERT_FALSE(all.empty());
      for (const Choice& c : all)
        if (c.plan.waits(c.deferred)) {
          EXPECT_LE(c.plan.blocks(), resident_blocks(c.plan.tiling, d));
        }
    }
}

TEST(Conv2dPlan, SmallLayersFillTheDevice) {
  for (const int stage : {0, 1, 2, 3}) {
    const int size[] = {21, 11, 6, 3};
    const int channels = 64 << stage;
    const Choice c = choose(
        shape_of(DType::kBFloat16, 2, size[stage], size[stage], channels, channels, 3, 1, 1, channels / 16), kHopper);
    EXPECT_GE(c.plan.blocks(), 50) << channels;
    EXPECT_FALSE(c.deferred);
  }
}

// Tensor maps hold padding below 128 and strides up to 8, and a box whole chunks of channels.
TEST(Conv2dPlan, Im2colServesWhatTensorMapsHold) {
  for (int tiling = 0; tiling < kNumTilings; tiling++) {
    const Tiling& t = kTilings[tiling];
    if (!t.im2col) continue;
    const auto served = [&](DType dtype, int channels, int stride, int padding) {
      return serves(t, shape_of(dtype, 2, 40, 40, channels, 64, 3, stride, padding));
    };
    EXPECT_TRUE(served(DType::kBFloat16, 64, 1, 1) && served(DType::kFloat32, 96, 8, 127));
    EXPECT_FALSE(served(DType::kBFloat16, 96, 1, 1) || served(DType::kFloat32, 16, 1, 1));
    EXPECT_FALSE(served(DType::kBFloat16, 64, 9, 1) || served(DType::kBFloat16, 64, 1, 128));
  }
}

// Layers of large images: the first of them takes 25 us in three splits and 36 unsplit (H200).
TEST(Conv2dPlan, LargeLayersOfTwoNetworksAreSplitWhereTilesAreFew) {
  Device device = kHopper;
  device.wgmma = true;
  const Choice last = choose(shape_of(DType::kBFloat16, 2, 15, 20, 512, 512, 3, 1, 1), device, 2);
  EXPECT_TRUE(kTilings[last.plan.tiling].wgmma);
  EXPECT_GE(last.plan.splits, 3);
  const Choice first = choose(shape_of(DType::kBFloat16, 2, 120, 160, 64, 64, 3, 1, 1), device, 2);
  EXPECT_TRUE(kTilings[first.plan.tiling].wgmma);
  EXPECT_EQ(first.plan.splits, 1);
}

}  // namespace
}  // namespace dpa::kernels::conv2d
