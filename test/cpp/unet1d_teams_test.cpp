// The plan of the loop in teams: which sizes it serves, and that every value, step and channel has its place.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "kernels/plans/unet1d/call.h"
#include "kernels/plans/unet1d/teams.h"

namespace dpa::kernels::unet1d {
namespace {

constexpr int kShared = 227 << 10;
const Config kManiSkill = {8, 3, {64, 128, 256}, 5, 8, 64, 84, true},
             kSimpleDp3 = {4, 3, {128, 256, 384}, 5, 8, 128, 64, true},
             kNoMaD = {2, 3, {64, 128, 256}, 3, 8, 256, 256, false}, kOdd = {2, 3, {96, 192, 320}, 7, 8, 64, 20, true},
             kGroups16 = {2, 2, {128, 256}, 3, 16, 16, 3, true};

TeamPlan made(const Config& c, DType dtype, int batch, int horizon, int teams = 16) {
  return make_teams(make_plan(c, dtype), batch, horizon, teams, kShared);
}

TEST(Teams, EveryStepChannelAndColumnHasAWarp) {
  for (const Config& c : {kManiSkill, kSimpleDp3, kNoMaD, kOdd, kGroups16})
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3})
      for (const int batch : {1, 3, 16, 32}) {
        const Plan plan = make_plan(c, dtype);
        const TeamPlan t = make_teams(plan, batch, 16, 16, kShared);
        if (!t.error.empty()) continue;
        ASSERT_EQ(t.phases.size(), plan.convs.size() + 1);
        EXPECT_GE(t.teams * t.samples, batch);
        EXPECT_LT((t.teams - 1) * t.samples, batch);
        EXPECT_LE(t.shared.bytes, kShared - kTeamStatic);
        for (size_t i = 0; i < t.phases.size(); i++) {
          const TeamPhase& f = t.phases[i];
          EXPECT_EQ(f.channels, f.groups * f.quads * 4);
          EXPECT_LE(t.samples * f.groups, kTeamPairs);
          if (f.log_pair_warps > 0) {
            EXPECT_LE(t.samples * f.groups << f.log_pair_warps, kTeamEpilogueWarps);
          }
          EXPECT_LE(f.quads * f.pass_times, 32 << f.log_pair_warps);
          EXPECT_GE(f.passes * f.pass_times, f.columns);
          EXPECT_LE(f.passes, kTeamPasses);
          EXPECT_GE(f.column_tiles * 8, t.samples * f.columns);
          EXPECT_EQ(f.times, f.columns << f.upsample);
          if (i == 0) continue;
          EXPECT_GE(f.rounds * f.warps_rows, f.row_tiles);
          EXPECT_EQ(f.warps_rows << f.log_warps_k, kPhaseWarps);
          for (int s = 0; s < f.num_segments; s++) EXPECT_EQ(f.segments[s].steps % 2, 0);  // warps take pairs
          EXPECT_LE(t.shared.buffer + t.buffer_slots * kPhaseWarps * team_slot_tiles(256 * element_bytes(dtype)) * 256 *
                                          element_bytes(dtype),
                    t.shared.bytes);
          for (int r = 0; r < kTeamBlocks; r++) {
            const int first = r * f.channels / 16;
            EXPECT_LE(((r + 1) * f.channels + 15) / 16 - first, f.row_tiles);
          }
        }
      }
}

// Where 15 clusters fit, a team takes two of 16 samples.
TEST(Teams, SixteenSamplesFitOnHopper) {
  for (const Config& c : {kManiSkill, kSimpleDp3})
    for (const DType dtype : {DType::kBFloat16, DType::kFloat8E4M3})
      EXPECT_EQ(make_teams(make_plan(c, dtype), 16, 16, 15, kShared).error, "");
}

// A phase reads the slab that the phase before wrote, and writes none that it or an unread skip connection lies in.
TEST(Teams, ASlabIsNotWrittenWhileItIsRead) {
  for (const Config& c : {kManiSkill, kSimpleDp3, kOdd, kGroups16}) {
    const Plan plan = make_plan(c, DType::kBFloat16);
    const TeamPlan t = make_teams(plan, 1, 16, 1, kShared);
    ASSERT_EQ(t.error, "");
    const int count = static_cast<int>(t.phases.size());
    auto bytes = [&](const TeamPhase& f) { return t.samples * f.out_rows * f.out_pitch; };
    for (int i = 1; i < count; i++) {
      const TeamPhase &before = t.phases[i - 1], &f = t.phases[i];
      EXPECT_EQ(f.value, before.out);
      EXPECT_EQ(f.pitch, before.out_pitch);
      EXPECT_EQ(f.rows, before.out_rows);
      if (i + 1 == count) continue;  // the last one writes none
      EXPECT_TRUE(f.out + bytes(f) <= f.value || before.out + bytes(before) <= f.out) << i;
      EXPECT_LE(f.out + bytes(f), t.shared.slabs + t.slab_bytes);
      for (int later = i + 1; later < count; later++) {  // skips that were written before and are read later
        const TeamPhase& reader = t.phases[later];
        if (!reader.joined) continue;
        int writer = -1;
        for (int w = 0; w < later - 1; w++)
          if (t.phases[w].out == reader.skip) writer = w;
        ASSERT_GE(writer, 0);
        if (writer < i) {
          EXPECT_TRUE(f.out + bytes(f) <= reader.skip || reader.skip + bytes(t.phases[writer]) <= f.out);
        }
      }
    }
  }
}

TEST(Teams, ServesNarrowNetworksAndSaysWhyNotOthers) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}) {
    for (const Config& c : {kManiSkill, kSimpleDp3, kNoMaD}) {
      EXPECT_EQ(made(c, dtype, 1, 16).error, "");
      EXPECT_EQ(made(c, dtype, 16, 16).error, "");
    }
    // its slabs of float32 alone take two thirds of the memory
    EXPECT_EQ(made(kOdd, dtype, 1, 16).error.empty(), dtype != DType::kFloat32);
  }
  const Config groups4 = {2, 2, {64, 128}, 5, 4, 32, 3, true}, narrow = {2, 2, {24, 40}, 3, 8, 32, 3, true};
  EXPECT_NE(made(groups4, DType::kBFloat16, 1, 16).error, "");
  EXPECT_NE(made(narrow, DType::kBFloat16, 1, 16).error, "");
  EXPECT_NE(made(kManiSkill, DType::kBFloat16, 1, 18).error, "");
  EXPECT_NE(made(kManiSkill, DType::kBFloat16, 1, 4096).error, "");
}

TEST(Teams, ALargeBatchIsTakenInParts) {
  const Plan plan = make_plan(kManiSkill, DType::kBFloat16);
  EXPECT_EQ(team_samples(plan, 16, 16, 16, kShared), 16);
  const int samples = team_samples(plan, 256, 16, 16, kShared);
  EXPECT_GE(samples, 16);
  EXPECT_EQ(make_teams(plan, samples, 16, 16, kShared).error, "");
}

}  // namespace
}  // namespace dpa::kernels::unet1d
