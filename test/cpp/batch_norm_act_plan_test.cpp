// How batch_norm_act is cut into blocks.
#include <gtest/gtest.h>

#include "kernels/plans/batch_norm_act/plan.h"

namespace dpa::kernels {
namespace {

bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

TEST(BatchNormActPlan, EveryShapeIsCoveredOrLeftAlone) {
  for (const bool clusters : {false, true})
    for (const int multiprocessors : {1, 16, 132})
      for (const int64_t channels : {0, 3, 8, 24, 64, 96, 512, 2048, 32768})
        for (const int64_t rows : {0, 1, 9, 441, 4800, 1228800})
          for (const int size : {2, 4}) {
            const BatchNormActPlan plan =
                batch_norm_act_plan({channels, rows}, size, BatchNormActDevice{multiprocessors, clusters});
            if (!plan.fits()) continue;
            const int slots = kBatchNormActThreads / plan.width;
            EXPECT_EQ(int64_t{plan.columns} * plan.width * 16 / size, channels) << "every column has a block";
            EXPECT_TRUE(is_power_of_two(plan.width) && is_power_of_two(plan.cluster));
            EXPECT_LE(plan.width, kBatchNormActWidest);
            EXPECT_LE(plan.cluster, clusters ? kBatchNormActCluster : 1);
            EXPECT_TRUE(plan.slices >= 1 && plan.slices <= kBatchNormActSlices);
            EXPECT_LT(int64_t{plan.slices - 1} * plan.cluster * slots, rows) << "every slice has a first row";
            int64_t counted = 0;
            for (int slice = 0; slice < plan.slices; ++slice) counted += batch_norm_act_count(plan, rows, slots, slice);
            EXPECT_EQ(counted, rows);
          }
}

TEST(BatchNormActPlan, AStemFillsTheDeviceOnce) {
  const BatchNormActPlan plan = batch_norm_act_plan({64, 16 * 240 * 320}, 2, {132, true});
  EXPECT_EQ(plan.cluster, 4);
  EXPECT_EQ(plan.slices, 64) << "256 blocks, two of a multiprocessor";
}

TEST(BatchNormActPlan, ChannelsOfNoWholeVectorsDoNotFit) {
  EXPECT_FALSE(batch_norm_act_plan({36, 16}, 2, {132, true}).fits());
  EXPECT_TRUE(batch_norm_act_plan({36, 16}, 4, {132, true}).fits());
}

}  // namespace
}  // namespace dpa::kernels
