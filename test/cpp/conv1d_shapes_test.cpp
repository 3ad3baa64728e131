// Which kernels the shapes that people train take: no kernel size, width, horizon or batch may fall to another library.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>

#include "kernels/plans/conv1d/mma_plan.h"
#include "kernels/plans/group_norm_mish/plan.h"

namespace dpa::kernels::conv1d {
namespace {

constexpr int kGroups = 8;

template <class F>
void each_block(F&& f) {
  for (const auto dtype : {DType::kBFloat16, DType::kFloat32})
    for (const int64_t batch : {1, 16, 64, 100, 256, 1024, 4096})
      for (const int64_t length : {1, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 56, 64})
        for (const int64_t channels : {2, 64, 96, 128, 192, 256, 320, 384, 512, 1024, 2048})
          for (int taps = 1; taps <= 9; ++taps) {
            // An even kernel's output is longer by one: the networks have none.
            if (taps % 2 == 0) continue;
            f(Conv1d{dtype, batch, length, channels, length, channels, taps, 1, taps / 2});
          }
}

TEST(Shapes, EveryBlockIsServedByBothForms) {
  each_block([](const Conv1d& c) {
    EXPECT_TRUE(serves(c) && mma_serves(c)) << c.batch << " " << c.y_length << " " << c.y_channels << " " << c.taps;
    EXPECT_TRUE(wgmma_takes_taps(c) || plan_mma_wgrad(c, 132).fits());
  });
}

TEST(Shapes, SoAreDownsamplingAndUpsampling) {
  for (const auto dtype : {DType::kBFloat16, DType::kFloat32})
    for (const int64_t batch : {1, 64, 4096})
      for (const int64_t length : {2, 4, 7, 10, 16, 24, 32, 64})
        for (const int64_t channels : {64, 96, 320, 1024}) {
          const int64_t down = (length - 1) / 2 + 1;
          EXPECT_TRUE(mma_serves({dtype, batch, down, channels, length, channels, 3, 2, 1})) << length;
          EXPECT_TRUE(mma_serves({dtype, batch, length, channels, 2 * length, channels, 4, 2, 1})) << length;
        }
}

TEST(Shapes, TilesAreNotLeftHalfEmpty) {
  each_block([](const Conv1d& c) {
    if (c.batch < 64 || c.y_length < 4) return;  // the networks halve no shorter horizon
    const auto used = [&](const RowTiles& rows, int tile) {
      return static_cast<double>(c.batch * c.y_length) / static_cast<double>(rows.count * tile);
    };
    const auto mma = plan_mma_fprop(c, 132).conv;
    EXPECT_GT(used(plan_fprop(c, 132).rows, kTileRows), 0.5) << c.batch << " " << c.y_length;
    EXPECT_GT(used(mma.rows, mma.tile_rows), 0.5) << c.batch << " " << c.y_length;
  });
}

TEST(Shapes, BlocksStayWithinTheDevicesMemoryAndLimits) {
  each_block([](const Conv1d& c) {
    for (const int multiprocessors : {36, 84, 108, 132, 170}) {
      for (const auto& plan : {plan_mma_fprop(c, multiprocessors), plan_mma_dgrad(c, multiprocessors)}) {
        EXPECT_LE(mma_bytes(plan), kMmaMemory);
        EXPECT_LE(plan.box_times * plan.conv.rows.samples, kMaxBoxRows);
        // Before a chunk's steps are all multiplied, the boxes of the chunks after it have had their time.
        EXPECT_GE((plan.boxes - 1) * plan.conv.terms[0] * plan.conv.parts,
                  mma_stages(plan.conv.tile_rows, plan.conv.tile_columns) - 1);
        // Every block has a part of K, and no block waits for a multiprocessor because of it.
        EXPECT_GE(plan.splits * plan.split_chunks, plan.conv.chunks);
        EXPECT_LT((plan.splits - 1) * plan.split_chunks, plan.conv.chunks);
        EXPECT_TRUE(plan.splits == 1 || plan.tiles() * plan.splits <= multiprocessors);
        EXPECT_EQ(plan.partials_bytes() > 0, plan.splits > 1);
      }
      const auto gradient = plan_mma_wgrad(c, multiprocessors);
      EXPECT_LE(mma_wgrad_bytes(c, gradient), kMmaMemory);
      EXPECT_GE(gradient.steps, gradient.splits);
      EXPECT_EQ(gradient.slots % c.taps, 0);
    }
  });
}

// A few rows of wide layers: with a tile a block, a deep convolution would have a few blocks only.
TEST(Shapes, FewTilesAreSharedByBlocks) {
  const Conv1d wide{DType::kBFloat16, 2, 16, 1024, 16, 1024, 5, 1, 2};
  for (const auto& plan : {plan_mma_fprop(wide, 132), plan_mma_dgrad(wide, 132)}) {
    EXPECT_EQ(plan.tiles(), 16);
    EXPECT_EQ(plan.splits, 8);
  }
  const Conv1d many{DType::kBFloat16, 256, 16, 256, 16, 256, 5, 1, 2},
      shallow{DType::kBFloat16, 1, 64, 64, 64, 64, 1, 1, 0};
  EXPECT_EQ(plan_mma_fprop(many, 132).splits, 1);
  EXPECT_EQ(plan_mma_fprop(shallow, 132).splits, 1);
}

// Normalisations that run in the convolution's epilogue, and those in a kernel of their own.
TEST(Shapes, NormalisationsOfTheNetworks) {
  const auto fused = [](int64_t batch, int64_t length, int64_t channels) {
    const Conv1d c{DType::kBFloat16, batch, length, channels, length, channels, 5, 1, 2};
    const int64_t group = channels / kGroups;
    const auto mma = plan_mma_fprop(c, 132, group);
    const bool by_mma = mma.fits() && normalises(c, mma.conv, group);
    EXPECT_EQ(by_mma, normalises(c, plan_fprop(c, 132), group)) << batch << " " << length << " " << channels;
    return by_mma;
  };
  for (const int64_t batch : {64, 256, 1024})
    for (int level = 0; level < 3; ++level) EXPECT_TRUE(fused(batch, 16 >> level, 256 << level));
  EXPECT_TRUE(fused(64, 32, 256) && fused(64, 64, 128));
  EXPECT_FALSE(fused(64, 64, 256));  // 2048 elements a group
  EXPECT_FALSE(fused(64, 12, 256) || fused(64, 16, 192));
}

// Levels of half the length and other widths: each normalisation is one kernel, but for rows that are not aligned, which
// go through contiguous copies.
TEST(Shapes, LevelsNormaliseInOneKernel) {
  for (const int size : {2, 4})
    for (const auto& widths : {std::array<int64_t, 3>{256, 512, 1024},
                               {512, 1024, 2048},
                               {128, 256, 384},
                               {192, 320, 640},
                               {64, 128, 256},
                               {96, 160, 480},
                               {48, 80, 240},
                               {40, 72, 200},
                               {104, 264, 504}})
      for (const int64_t horizon : {8, 12, 16, 20, 32, 48, 64})
        for (const int64_t batch : {16, 4096})
          for (int level = 0; level < 3; ++level)
            EXPECT_TRUE(teams({batch, widths[level], horizon >> level, kGroups}, size, true).fits())
                << size << " " << widths[level] << " " << horizon;
  EXPECT_FALSE(teams({64, 36, 16, 6}, 2, true).fits());
  EXPECT_FALSE(teams({64, 30, 16, 6}, 4, true).fits());
}

}  // namespace
}  // namespace dpa::kernels::conv1d
