// How group_norm_mish is cut into teams of threads.
#include <gtest/gtest.h>

#include <utility>

#include "kernels/plans/group_norm_mish/plan.h"

namespace dpa::kernels {
namespace {

void expect_sound(const NormShape& shape, int element_size, bool clusters) {
  const NormPlan plan = teams(shape, element_size, clusters);
  if (!plan.fits()) return;
  const int64_t row = shape.channels / shape.groups, whole = 16 / element_size;
  EXPECT_EQ(plan.channels, row);
  EXPECT_EQ(row % plan.owned, 0) << "whole vectors";
  EXPECT_TRUE(plan.owned == whole || (plan.owned < whole && row % (2 * plan.owned) != 0)) << "the largest";
  EXPECT_EQ(shape.channels % whole, 0) << "rows are aligned";
  EXPECT_GE(plan.width * plan.owned, row);
  EXPECT_LE(plan.width, plan.threads);
  if (plan.ranks > 0) {
    EXPECT_TRUE(plan.threads == kMaxTeam && plan.block == kMaxTeam && plan.groups == 1);
    EXPECT_TRUE(plan.ranks <= (clusters ? kMaxRanks : 1) && (plan.ranks & (plan.ranks - 1)) == 0);
    EXPECT_GT(shape.inner * plan.channels, kMaxTeam * 4 * plan.owned / 2) << "smaller ones a team holds";
    EXPECT_EQ(slices(shape, plan) % plan.ranks, 0);
  } else {
    EXPECT_GE(plan.threads / plan.width * plan.vectors, shape.inner) << "every row has a place";
  }
  if (plan.ranks > 0 || plan.owned == whole)
    EXPECT_TRUE(plan.vectors == 1 || plan.vectors == 2 || plan.vectors == 4);
  else
    EXPECT_TRUE(plan.vectors == 4 || plan.vectors == (plan.owned > 1 ? 8 : 16));
  EXPECT_EQ(shape.groups % plan.groups, 0);
  EXPECT_EQ(plan.block % kWarpThreads, 0);
  if (plan.threads > kWarpThreads)
    EXPECT_EQ(plan.block, plan.threads);
  else
    EXPECT_LE(plan.groups * plan.threads, kWarpThreads);
  EXPECT_GE(plan.samples(), 1);
  EXPECT_GE(plan.sum_places(), plan.groups * plan.width);
  EXPECT_LE(plan.sum_places(), plan.block);
  const int64_t count = slices(shape, plan);
  EXPECT_LE(count, kMaxSlices);
  EXPECT_EQ(count > 0, shape.batch > 0);
}

TEST(NormPlan, EveryShapeIsCoveredOrLeftAlone) {
  for (const int64_t batch : {0, 1, 3, 1024, 1000000})
    for (const int64_t groups : {1, 3, 8, 48})
      for (int64_t row = 0; row <= 520; row += row < 40 ? 1 : 8)
        for (const int64_t inner : {0, 1, 2, 4, 7, 16, 48, 64, 1000})
          for (const int size : {2, 4, 8})
            for (const bool clusters : {false, true})
              expect_sound({batch, groups * row, inner, groups}, size, clusters);
}

TEST(NormPlan, TheNetworksRunOnWarps) {
  for (const auto& [channels, inner] :
       {std::pair<int64_t, int64_t>{256, 16}, {512, 8}, {1024, 4}, {512, 16}, {2048, 4}}) {
    const NormPlan plan = teams({64, channels, inner, 8}, 2, true);
    EXPECT_EQ(plan.threads, kWarpThreads) << channels;
    EXPECT_LE(plan.vectors, 4) << channels;
  }
}

TEST(NormPlan, GroupsThatAreNoWholeVectorsHaveSmallerOnes) {
  for (const int64_t inner : {2, 16, 24, 64})
    for (const auto& [channels, owned] :
         {std::pair<int64_t, int>{48, 2}, {96, 4}, {160, 4}, {240, 2}, {480, 4}, {40, 1}, {360, 1}, {504, 1}}) {
      const NormPlan plan = teams({64, channels, inner, 8}, 2, true);
      EXPECT_TRUE(plan.fits()) << channels << " channels, " << inner;
      EXPECT_EQ(plan.owned, owned) << channels;
    }
}

TEST(NormPlan, LargeGroupsAreShared) {
  EXPECT_EQ(teams({64, 1032, 16, 8}, 2, true).ranks, 0);
  EXPECT_EQ(teams({64, 1032, 64, 8}, 2, true).ranks, 1) << "512 groups fill the device";
  EXPECT_EQ(teams({1, 64, 10000, 8}, 2, true).ranks, 8);
  EXPECT_EQ(teams({1, 64, 10000, 8}, 2, false).ranks, 1);
  EXPECT_EQ(teams({2, 512, 64, 1}, 2, true).ranks, 4) << "each block has its rows at once";
}

TEST(NormPlan, RowsThatAreNotAlignedOrTooWideDoNotFit) {
  EXPECT_FALSE(teams({64, 36, 16, 6}, 2, true).fits());
  EXPECT_FALSE(teams({64, 2304, 16, 1}, 2, true).fits());
  EXPECT_FALSE(teams({1, 0, 16, 8}, 2, true).fits());
}

}  // namespace
}  // namespace dpa::kernels
