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
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
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
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16})
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
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const Config& c : {kManiSkill, kSimpleDp3, kNoMaD}) {
      EXPECT_EQ(made(c, dtype, 1, 16).error, "");
      EXPECT_EQ(made(c, dtype, 16, 16).error, "");
    }
    // its slabs of float32 alone take two thirds of the memory
    EXPECT_EQ(made(kOdd, dtype, 1, 16).error.empty(), dtype != DType::kFloat32);
  }
  const Config groups4 = {2, 2, {64, 128}, 5, 4, 32, 3, true}, narrow = {2, 2, {24, 40}, 3, 8, 32, 3, true};
  EXPECT_NE(made(kManiSkill, DType::kFloat8E4M3, 1, 16).error, "");
  EXPECT_NE(made(groups4, DType::kBFloat16, 1, 16).error, "");
  EXPECT_NE(made(narrow, DType::kBFloat16, 1, 16).error, "");
  EXPECT_NE(made(kManiSkill, DType::kBFloat16, 1, 18).error, "");
  EXPECT_NE(made(kManiSkill, DType::kBFloat16, 1, 4096).error, "");
}

TEST(Teams, NormsCountTheNetworksOwnChannels) {
  const Config c = {3, 2, {64, 160}, 5, 8, 32, 5, true, false, {40, 144}};
  const TeamPlan t = made(c, DType::kBFloat16, 1, 16);
  ASSERT_EQ(t.error, "");
  for (const TeamPhase& f : t.phases) {
    const bool wide = f.channels == 20;
    EXPECT_EQ(f.channels, wide ? 20 : 8);
    EXPECT_EQ(f.counted, wide ? 18 : 5);
    EXPECT_FLOAT_EQ(f.inverse_count, 1.0f / static_cast<float>(f.times * f.counted));
  }
}

TEST(Teams, ALargeBatchIsTakenInParts) {
  const Plan plan = make_plan(kManiSkill, DType::kBFloat16);
  EXPECT_EQ(team_parts(plan, 16, 16, 16, kShared).samples, 16);
  EXPECT_EQ(team_parts(plan, 64, 16, 16, kShared).samples, 32);
  EXPECT_EQ(team_parts(plan, 5, 4096, 16, kShared).samples, 0);
  for (const int batch : {17, 28, 45, 256}) {
    const TeamCall parts = team_parts(plan, batch, 24, 15, kShared);
    const TeamPlan made = make_teams(plan, parts.samples, 24, 15, kShared);
    EXPECT_EQ(made.error, "");
    EXPECT_GE(parts.time, ceil_div(batch, parts.samples) * 0.99 * team_time(made, plan.dtype, 24));
  }
}

// us of a step, one H200.
TEST(Teams, TheEstimateIsNearWhatWasMeasured) {
  const struct {
    Config config;
    DType dtype;
    int samples, horizon;
    double us;
  } measured[] = {{kManiSkill, DType::kBFloat16, 1, 16, 49},
                  {kManiSkill, DType::kBFloat16, 1, 48, 75},
                  {kManiSkill, DType::kBFloat16, 2, 16, 55},
                  {kManiSkill, DType::kFloat32, 1, 16, 68},
                  {kSimpleDp3, DType::kBFloat16, 1, 16, 69},
                  {kSimpleDp3, DType::kFloat32, 1, 16, 129},
                  {kNoMaD, DType::kBFloat16, 1, 8, 43},
                  {kOdd, DType::kBFloat16, 1, 16, 84},
                  {{7, 3, {192, 384, 640}, 5, 8, 64, 84, true}, DType::kBFloat16, 1, 16, 231},
                  {{7, 2, {32, 64}, 3, 8, 64, 84, true}, DType::kFloat32, 2, 16, 41}};
  for (const auto& row : measured) {
    const Plan plan = make_plan(row.config, row.dtype);
    const double us = team_time(make_teams(plan, row.samples, row.horizon, 1, kShared), row.dtype, row.horizon);
    EXPECT_GT(us, 0.7 * row.us);
    EXPECT_LT(us, 1.2 * row.us);
  }
}

}  // namespace
}  // namespace dpa::kernels::unet1d
