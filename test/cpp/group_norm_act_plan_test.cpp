// How group_norm_act is cut into clusters of blocks.
#include <gtest/gtest.h>

#include "kernels/plans/group_norm_act/plan.h"

namespace dpa::kernels {
namespace {

bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

TEST(GroupNormActPlan, EveryShapeIsCoveredOrLeftAlone) {
  for (const int64_t groups : {1, 3, 8, 48})
    for (int64_t row = 0; row <= 520; row += row < 40 ? 1 : 8)
      for (const int64_t rows : {0, 1, 9, 441, 1764, 76800})
        for (const int size : {2, 4})
          for (const bool clusters : {false, true}) {
            const GroupNormActPlan plan = group_norm_act_plan({2, groups * row, rows, groups}, size, clusters);
            if (!plan.fits()) continue;
            EXPECT_EQ(plan.group * 16 / size, row);
            EXPECT_EQ(int64_t{plan.columns} * plan.width * 16 / size, groups * row) << "every column has a block";
            EXPECT_TRUE(is_power_of_two(plan.width) && is_power_of_two(plan.group) && is_power_of_two(plan.cluster));
            EXPECT_EQ(plan.width % plan.group, 0) << "whole groups";
            EXPECT_LE(plan.width / plan.group, 32) << "as many as a block keeps sums of";
            EXPECT_LE(plan.width, kGroupNormActWidest);
            EXPECT_LE(plan.cluster, clusters ? kGroupNormActCluster : 1);
            EXPECT_LE(plan.held, clusters ? kGroupNormActHeld : 0) << "where there is that much shared memory";
            if (plan.held == 0) continue;
            const int64_t slots = int64_t{plan.cluster} * kGroupNormActThreads / plan.width;
            EXPECT_GE(plan.held * slots, rows) << "every row has a slot";
            EXPECT_LT((plan.held - 1) * slots, rows) << "no slot is left";
          }
}

TEST(GroupNormActPlan, ResNetsOf84PixelsFit) {
  for (const int size : {2, 4}) {
    EXPECT_EQ(group_norm_act_plan({128, 64, 42 * 42, 4}, size, true).cluster, 8);
    EXPECT_EQ(group_norm_act_plan({128, 64, 21 * 21, 4}, size, true).cluster, 2);
    EXPECT_EQ(group_norm_act_plan({128, 64, 108 * 108, 4}, size, true).held, 0) << "45 rows a thread";
    const GroupNormActPlan last = group_norm_act_plan({128, 512, 9, 32}, size, true);
    EXPECT_EQ(last.cluster, 1);
    EXPECT_EQ(last.width, 32) << "nine rows fill a block of 256 threads";
  }
}

TEST(GroupNormActPlan, GroupsOfNoWholeVectorsDoNotFit) {
  EXPECT_FALSE(group_norm_act_plan({2, 36, 16, 9}, 2, true).fits());
  EXPECT_FALSE(group_norm_act_plan({2, 96, 16, 4}, 2, true).fits());
  EXPECT_FALSE(group_norm_act_plan({2, 0, 16, 4}, 2, true).fits());
}

}  // namespace
}  // namespace dpa::kernels
