// The plan of the loop in phases: what fits where, what its tiles cover, and which calls take which path.
#include <gtest/gtest.h>

#include "kernels/plans/unet1d/call.h"
#include "kernels/plans/unet1d/phases.h"

namespace dpa::kernels::unet1d {
namespace {

const Device kHopper = {132, 227 << 10, true, true}, kA100 = {108, 163 << 10}, kRtx3090 = {82, 99 << 10},
             kOrin = {16, 163 << 10};
const Config kHeadline = {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true},
             kLeRobot = {6, 3, {512, 1024, 2048}, 5, 8, 128, 268, true}, kUneven = {3, 2, {48, 80}, 7, 4, 32, 3, false},
             kOne = {2, 1, {64}, 9, 8, 16, 0, true};

TEST(Phases, TilesCoverEveryGemmOfEverySize) {
  for (const Config& config : {kHeadline, kLeRobot, kUneven, kOne})
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3})
      for (const int batch : {1, 3, 16})
        for (const Device& d : {kHopper, kA100, kRtx3090, kOrin}) {
          const Plan plan = make_plan(config, dtype);
          const PhasePlan made = make_phases(plan, batch, 16, {d.multiprocessors, d.shared_bytes});
          if (!made.error.empty()) continue;  // which sizes must fit: below
          ASSERT_EQ(made.phases.size(), plan.convs.size() + 2);
          EXPECT_LE(made.shared.bytes, d.shared_bytes);
          for (const Phase& f : made.phases) {
            EXPECT_EQ(f.tiles, f.slices_out * f.slices_in * f.slices_batch);
            EXPECT_GE(f.slices_batch * f.samples, batch);
            EXPECT_LT((f.slices_batch - 1) * f.samples, batch);
            if (f.kind != PhaseKind::kConv) continue;
            EXPECT_EQ(f.units * f.unit_channels, f.channels_in);
            EXPECT_GE(f.row_tiles * 16, f.channels_out);
            EXPECT_GE(f.warps_columns * f.column_tiles * 8, f.samples * f.columns);
            EXPECT_LE(f.warps_rows * f.warps_columns * f.warps_k, kPhaseWarps);
            if (f.slices_in > 1 && f.units % f.slices_in == 0) {
              EXPECT_EQ(f.units / f.slices_in * f.unit_channels % 16, 0);
            }
            if (f.norm >= 0) {
              EXPECT_EQ(f.unit_channels % f.group_channels, 0);
            }
          }
        }
}

TEST(Phases, SizesInRealUseFit) {
  const auto fits = [](const Config& c, DType dtype, int batch, int horizon, const Device& d) {
    return phase_samples(make_plan(c, dtype), batch, horizon, d) > 0;
  };
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3}) {
    for (const Device& d : {kHopper, kA100, kRtx3090, kOrin}) EXPECT_TRUE(fits(kHeadline, dtype, 1, 16, d));
    EXPECT_TRUE(fits(kLeRobot, dtype, 1, 64, kHopper));
    EXPECT_TRUE(fits(kHeadline, dtype, 256, 16, kHopper));
  }
  EXPECT_TRUE(fits(kLeRobot, DType::kBFloat16, 1, 64, kA100));
  EXPECT_TRUE(fits(kLeRobot, DType::kBFloat16, 1, 16, kRtx3090));
}

TEST(Phases, ALargeBatchIsTakenInEqualParts) {
  const Plan plan = make_plan(kHeadline, DType::kBFloat16);
  EXPECT_EQ(phase_samples(plan, 64, 16, kA100), 64);
  EXPECT_EQ(phase_samples(plan, 65, 16, kA100), 33);
  EXPECT_EQ(phase_samples(plan, 256, 16, kA100), 64);
}

TEST(ChoosePath, ByDeviceAndSize) {
  const Plan bf16 = make_plan(kHeadline, DType::kBFloat16), fp32 = make_plan(kHeadline, DType::kFloat32),
             large = make_plan(kLeRobot, DType::kBFloat16), uneven = make_plan(kUneven, DType::kBFloat16);
  EXPECT_EQ(choose_path(bf16, 1, 16, kHopper), Path::kResident);
  EXPECT_EQ(choose_path(fp32, 1, 16, kHopper), Path::kResident);
  EXPECT_EQ(choose_path(bf16, 16, 16, kHopper), Path::kClustered);
  EXPECT_EQ(choose_path(bf16, 64, 16, kHopper), Path::kPhases);
  EXPECT_EQ(choose_path(fp32, 16, 16, kHopper), Path::kPhases);
  EXPECT_EQ(choose_path(large, 1, 64, kHopper), Path::kPhases);
  EXPECT_EQ(choose_path(uneven, 1, 16, kHopper), Path::kPhases);
  for (const Device& d : {kA100, kRtx3090, kOrin}) EXPECT_EQ(choose_path(bf16, 1, 16, d), Path::kPhases);
  EXPECT_EQ(choose_path(bf16, 1, 4096, kHopper), Path::kLayered);
}

}  // namespace
}  // namespace dpa::kernels::unet1d
