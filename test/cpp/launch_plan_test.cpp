// Choices that are made on the host before a kernel is launched.
#include <gtest/gtest.h>

#include <limits>

#include "kernels/plans/grid.h"
#include "kernels/plans/lltm/plan.h"

namespace dpa::kernels {
namespace {

TEST(GridFor, HasABlockForTheLastItemAndNoneForNothing) {
  EXPECT_EQ(grid_for(0, 256), 0u);
  EXPECT_EQ(grid_for(1, 256), 1u);
  EXPECT_EQ(grid_for(256, 256), 1u);
  EXPECT_EQ(grid_for(257, 256), 2u);
  EXPECT_EQ(grid_for(7, 1), 7u);
}

TEST(GridFor, StopsAtTheLargestGrid) {
  const int64_t most = (int64_t{1} << 31) - 1;
  EXPECT_EQ(grid_for(most, 1), most);
  EXPECT_EQ(grid_for(most + 1, 1), most);
  EXPECT_EQ(grid_for(std::numeric_limits<int64_t>::max(), 1), most);
  EXPECT_EQ(grid_for(std::numeric_limits<int64_t>::max(), 1024), most);  // rounding up must not overflow
}

TEST(Fits32Bits, LeavesRoomForAGridBeyondTheLastItem) {
  const int64_t limit = int64_t{1} << 31;
  EXPECT_TRUE(fits_32_bits(0));
  EXPECT_TRUE(fits_32_bits(limit - 1));
  EXPECT_FALSE(fits_32_bits(limit));
}

TEST(LltmIsSmall, DrawsTheLineWherePageAndBenchmarksDo) {
  EXPECT_TRUE(lltm_is_small(16, 32, 128));
  EXPECT_FALSE(lltm_is_small(256, 256, 1024));
}

TEST(LltmIsSmall, TakesEmptySizes) {
  for (int64_t batch : {0, 1}) {
    for (int64_t features : {0, 1}) {
      for (int64_t state : {0, 1}) EXPECT_TRUE(lltm_is_small(batch, features, state));
    }
  }
}

TEST(LltmIsSmall, KeepsRowsWithinSharedMemory) {
  EXPECT_TRUE(lltm_is_small(1, kLltmMaxInputs - 1, 1));
  EXPECT_FALSE(lltm_is_small(1, kLltmMaxInputs, 1));
}

TEST(LltmIsSmall, NeverBecomesTrueAgainAsASizeGrows) {
  for (int which = 0; which < 3; ++which) {
    int64_t size[3] = {16, 32, 128};
    bool before = true;
    for (size[which] = 1; size[which] < (int64_t{1} << 20); size[which] *= 2) {
      const bool now = lltm_is_small(size[0], size[1], size[2]);
      EXPECT_TRUE(before || !now) << which << " " << size[which];
      before = now;
    }
    EXPECT_FALSE(before) << which;
  }
}

}  // namespace
}  // namespace dpa::kernels
