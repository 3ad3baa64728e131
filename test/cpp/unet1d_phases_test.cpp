// The plan of the loop in phases: what fits where, what its tiles cover, and which calls take which path.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/plans/unet1d/call.h"
#include "kernels/plans/unet1d/phases.h"
#include "kernels/plans/unet1d/teams.h"
#include "kernels/plans/unet1d/widths.h"

namespace dpa::kernels::unet1d {
namespace {

const Device kHopper = {132, 227 << 10, true, true, 16}, kA100 = {108, 163 << 10}, kRtx3090 = {82, 99 << 10},
             kOrin = {16, 163 << 10};
const Config kHeadline = {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true},
             kLeRobot = {6, 3, {512, 1024, 2048}, 5, 8, 128, 268, true}, kUneven = {3, 2, {48, 80}, 7, 4, 32, 3, false},
             kOne = {2, 1, {64}, 9, 8, 16, 0, true}, kManiSkill = {8, 3, {64, 128, 256}, 5, 8, 64, 84, true},
             kSimpleDp3 = {4, 3, {128, 256, 384}, 5, 8, 128, 64, true};

TEST(Phases, TilesCoverEveryGemmOfEverySize) {
  for (const Config& config : {kHeadline, kLeRobot, kUneven, kOne})
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3})
      for (const int batch : {1, 3, 16})
        for (const Device& d : {kHopper, kA100, kRtx3090, kOrin}) {
          const Plan plan = make_plan(config, dtype);
          const PhasePlan made = make_phases(plan, batch, 16, {d.multiprocessors, d.shared_bytes});
          if (!made.error.empty()) continue;  // which sizes must fit: below
          ASSERT_EQ(made.phases.size(), plan.convs.size() + made.finishes + 2);
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

// A phase that finishes an input has all of it, keeps it, and the convolution behind it reads just that.
TEST(Phases, FinishedInputs) {
  for (const Config& config : {kHeadline, kLeRobot, kUneven, kOne})
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const Plan plan = make_plan(config, dtype);
      const PhasePlan made = make_phases(plan, 4, 16, kHopper, Finish::kAlways);
      ASSERT_EQ(made.error, "");
      ASSERT_EQ(made.finishes, static_cast<int>(plan.convs.size()));
      for (size_t i = 0; i < plan.convs.size(); i++) {
        const Phase &first = made.phases[2 * i], &then = made.phases[2 * i + 1];
        ASSERT_EQ(first.kind, PhaseKind::kFinish);
        ASSERT_EQ(then.kind, PhaseKind::kConv);
        EXPECT_EQ(first.slices_out, 1);
        EXPECT_EQ(first.tiles, first.slices_in * first.slices_batch);
        EXPECT_GE(first.samples * first.slices_batch, 4);
        EXPECT_LE(first.slices_in, first.units);
        EXPECT_EQ(first.value.kind, i == 0 ? SourceKind::kHead : SourceKind::kPartials);
        EXPECT_EQ(first.norm, i == 0 ? plan.head.norm : plan.convs[i - 1].norm);
        if (i > 0) {
          EXPECT_EQ(first.value.words, made.phases[2 * i - 1].segments[0].out);
          EXPECT_EQ(first.value.partials, made.phases[2 * i - 1].slices_in);
          EXPECT_EQ(first.residual.kind != SourceKind::kNone, plan.convs[i - 1].add);
        }
        EXPECT_EQ(then.skip.kind == SourceKind::kFinished, plan.convs[i].skip_in >= 0);
        EXPECT_EQ(first.num_segments, 0);
        EXPECT_EQ(then.value.kind, SourceKind::kFinished);
        EXPECT_EQ(then.value.words, first.keep);
        EXPECT_EQ(then.value.column_stride, first.keep_stride);
        EXPECT_EQ(then.channels_in, first.channels_in);
        EXPECT_EQ(then.times_in, first.times_in);
        EXPECT_EQ(then.norm, -1);
        EXPECT_EQ(then.residual.kind, SourceKind::kNone);
        EXPECT_EQ(then.joined, plan.convs[i].skip_in >= 0);
        EXPECT_EQ(first.joined, 0);
      }
    }
}

// Where no room would do, sizes are refused before they are multiplied.
TEST(Phases, LongHorizonsAreRefused) {
  for (const int horizon : {1 << 16, 1 << 20})
    EXPECT_EQ(make_phases(make_plan(kLeRobot, DType::kFloat32), 1, horizon, kHopper).error,
              "a tile does not fit into shared memory");
}

// They pay where many tiles would finish the same values.
TEST(Phases, WhichInputsAreFinished) {
  const auto finishes = [](const Config& c, DType dtype, int batch, int horizon) {
    return make_phases(make_plan(c, dtype), batch, horizon, kHopper).finishes;
  };
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3}) {
    EXPECT_EQ(finishes(kHeadline, dtype, 1, 16), 0);
    EXPECT_EQ(finishes(kManiSkill, dtype, 16, 16), 0);
    EXPECT_GE(finishes(kHeadline, dtype, 16, 16), 8);
    EXPECT_GE(finishes(kLeRobot, dtype, 8, 64), 16);
  }
}

// The rows of eight neighbouring times, which are columns of a GEMM of stride one, lie in eight different sixteens of a
// line of shared memory's banks, whichever samples they are of.
TEST(Phases, ColumnsLieInDifferentBanks) {
  for (const int element : {2, 4})
    for (const int channels : {16, 48, 128, 256})
      for (const int pad : {0, 1, 2, 4})
        for (const int times : {1, 2, 3, 4, 6, 8, 12, 16}) {
          const int row = slab_row(channels, element), sample = slab_sample(times, pad, row);
          EXPECT_GE(sample, (times + pad) * row);
          EXPECT_EQ(sample % 16, 0);
          for (int first = 0; first < 3 * times; first++) {
            unsigned banks = 0;
            for (int i = first; i < first + 8; i++) banks |= 1u << (i / times * sample + i % times * row) / 16 % 8;
            EXPECT_EQ(banks, 0xffu) << channels << " " << pad << " " << times << " from " << first;
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
  // With two slots of weights a warp.
  EXPECT_TRUE(fits(kLeRobot, DType::kFloat32, 1, 16, kRtx3090));
  EXPECT_TRUE(fits(kHeadline, DType::kFloat32, 1, 48, kRtx3090));
}

// What DPA_TEST_MULTIPROCESSORS limits a GPU to (an A100's, a 3090's, a 4070's, an Orin's) or more, with the shared memory
// that a block has on one generation or another: every tile fits, and no block has more tiles than another has and one.
TEST(Phases, FewMultiprocessorsAndLittleSharedMemory) {
  int made_plans = 0;
  for (const Config& config : {kHeadline, kLeRobot, kUneven, kOne})
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3}) {
      const Plan plan = make_plan(config, dtype);
      for (const int blocks : {132, 108, 82, 46, 16, 8})
        for (const int shared : {227, 163, 99, 64, 48}) {
          const PhasePlan made = make_phases(plan, 1, 16, {blocks, shared << 10});
          if (!made.error.empty()) continue;
          made_plans++;
          EXPECT_LE(made.shared.bytes, shared << 10);
          EXPECT_GE(made.ring_slots, kPhaseLeastSlots);
          int runs = 0;
          for (const Phase& f : made.phases) {
            if (f.kind != PhaseKind::kConv) continue;
            EXPECT_EQ(f.tiles, f.slices_out * f.slices_in * f.slices_batch);
            EXPECT_LE(f.slices_out, f.row_tiles);
            EXPECT_LE(f.slices_in, f.units);
            EXPECT_LE(f.shared.statistics + (f.norm < 0 ? 0 : 16), made.shared.bytes);
            runs += f.num_segments * ceil_div(f.tiles, blocks) *
                    ceil_div(ceil_div(f.row_tiles, f.slices_out), f.warps_rows);
          }
          EXPECT_LE(runs, made.warp_runs);
        }
    }
  EXPECT_GE(made_plans, 250);  // of 360: a device that has them all refuses few
}

// The networks that a GPU of that size is measured with fit on it, with the least shared memory of its generation.
TEST(Phases, TheHeadlineNetworkFitsOnEveryGeneration) {
  const struct {
    int blocks, shared;
  } devices[] = {{108, 163}, {82, 99}, {46, 99}, {16, 163}};
  for (const auto& d : devices)
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}) {
      const Plan plan = make_plan(kHeadline, dtype);
      for (const int batch : {1, 2, 16})
        EXPECT_GT(phase_samples(plan, batch, 16, {d.blocks, d.shared << 10}), 0) << d.blocks << " " << batch;
    }
}

TEST(Phases, ALargeBatchIsTakenInEqualParts) {
  const Plan plan = make_plan(kHeadline, DType::kBFloat16);
  EXPECT_EQ(phase_samples(plan, 256, 16, kA100), 256);
  EXPECT_EQ(phase_samples(plan, 301, 16, kA100), 151);
  EXPECT_EQ(phase_samples(make_plan(kManiSkill, DType::kFloat32), 256, 64, kHopper), 256);
  EXPECT_EQ(phase_samples(make_plan(kLeRobot, DType::kFloat32), 64, 16, kHopper), 64);
}

// What a batch takes at once stays below a gigabyte of messages, on sizes in real use.
TEST(Phases, LargeBatchesHaveTheMemory) {
  for (const Config& c : {kManiSkill, kSimpleDp3, kHeadline, kLeRobot})
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
      for (const int horizon : {16, 64, 128}) {
        const Plan plan = make_plan(c, dtype);
        const int samples = phase_samples(plan, 256, horizon, kHopper);
        if (samples == 0) continue;
        EXPECT_LT(workspace_bytes(plan, 256, horizon, 100, Path::kPhases, kHopper), size_t{1} << 30)
            << c.down_dims[0] << " " << horizon;
      }
}

// Places of messages are ints. The most that a launch has are those of eight GEMMs of 2432 channels, of one tap: a wider
// network has fewer columns a launch, and of 31 K channels no tile fits. With more shared memory than any device has,
// a batch of too many is refused, and so taken in parts.
TEST(Phases, PlacesOfMessagesAreInts) {
  const auto alone = [](int width) { return make_plan({2, 1, {width}, 1, 8, 16, 0, true}, DType::kFloat32); };
  int most = 0;
  for (int width = 1024; width <= 4096; width += 128)
    for (const int horizon : {1, 16}) {
      const Plan plan = alone(width);
      const int samples = phase_samples(plan, 16384 / horizon, horizon, kHopper);
      most = std::max(most, make_phases(plan, samples, horizon, kHopper).workspace_words);
    }
  EXPECT_GT(most, 900'000'000);
  EXPECT_LT(most, 1'000'000'000);
  EXPECT_EQ(phase_samples(alone(32768), 512, 2, kHopper), 0);
  const Device roomy = {132, 1 << 20};
  EXPECT_EQ(make_phases(alone(32768), 512, 2, roomy).error, "the messages must be fewer than 2^31 words");
  EXPECT_EQ(phase_samples(alone(32768), 512, 2, roomy), 256);
  EXPECT_GT(make_phases(alone(32768), 256, 2, roomy).workspace_words, 1 << 30);
}

TEST(ChoosePath, ByDeviceAndSize) {
  const Plan bf16 = make_plan(kHeadline, DType::kBFloat16), fp32 = make_plan(kHeadline, DType::kFloat32),
             large = make_plan(kLeRobot, DType::kBFloat16), uneven = make_plan(kUneven, DType::kBFloat16);
  EXPECT_EQ(choose_path(bf16, 1, 16, kHopper), Path::kResident);
  EXPECT_EQ(choose_path(fp32, 1, 16, kHopper), Path::kResident);
  EXPECT_EQ(choose_path(bf16, 16, 16, kHopper), Path::kClustered);
  EXPECT_EQ(choose_path(bf16, 64, 16, kHopper), Path::kPhases);
  EXPECT_EQ(choose_path(fp32, 16, 16, kHopper), Path::kPhases);
  EXPECT_EQ(choose_path(large, 1, 64, kHopper), Path::kClustered);
  EXPECT_EQ(choose_path(large, 2, 64, kHopper), Path::kClustered);
  EXPECT_EQ(choose_path(uneven, 1, 16, kHopper), Path::kPhases);
  for (const Device& d : {kA100, kRtx3090}) EXPECT_EQ(choose_path(bf16, 1, 16, d), Path::kResident);
  EXPECT_EQ(choose_path(bf16, 1, 16, kOrin), Path::kPhases);
  EXPECT_EQ(choose_path(bf16, 2, 16, kA100), Path::kPhases);
  EXPECT_EQ(choose_path(bf16, 1, 4096, kHopper), Path::kLayered);
  EXPECT_EQ(choose_path(bf16, 1, 64, kHopper), Path::kResident);
  EXPECT_EQ(choose_path(fp32, 1, 64, kHopper), Path::kResident);
  EXPECT_EQ(choose_path(bf16, 1, 4, kHopper), Path::kResident);
}

// Kernels for wide networks alone have Mish.
TEST(ChoosePath, ReluIsForTheOthers) {
  for (const Config& mish : {kHeadline, kLeRobot}) {
    Config relu = mish;
    relu.relu = true;
    for (const DType dtype : {DType::kFloat16, DType::kFloat8E4M3, DType::kFloat32, DType::kBFloat16}) {
      for (const int batch : {1, 2, 16, 64}) {
        const Path path = choose_path(make_plan(relu, dtype), batch, 64, kHopper);
        EXPECT_TRUE(path == Path::kTeams || path == Path::kPhases || path == Path::kLayered) << name_of(path);
        EXPECT_FALSE(layers_pay(make_plan(relu, dtype), batch, 64, kHopper));
      }
    }
  }
}

// Filled up, also where a group has a single time's values.
TEST(ChoosePath, FilledUpForOneSample) {
  const Config filled = {3, 3, {128, 256, 512}, 5, 8, 16, 4, true, false, {128, 256, 384}};
  for (const DType dtype : {DType::kFloat16, DType::kFloat8E4M3, DType::kFloat32, DType::kBFloat16}) {
    for (const int horizon : {4, 8})
      EXPECT_EQ(choose_path(make_plan(filled, dtype), 1, horizon, kHopper), Path::kResident);
  }
}

TEST(LayersPay, BySizeAndDevice) {
  struct {
    std::vector<int> widths;
    int kernel, batch, horizon;
    bool hopper;
  } const rows[] = {
      {{256, 512, 1024}, 5, 1, 16, false},  {{256, 512, 1024}, 5, 16, 16, false},  // clusters
      {{256, 512, 1024}, 5, 17, 16, true},  {{256, 512, 1024}, 5, 64, 16, true},
      {{256, 512, 1024}, 5, 16, 32, true},  {{256, 512, 1024}, 5, 17, 32, true},
      {{256, 512, 1024}, 5, 4, 48, false},  {{256, 512, 1024}, 5, 10, 48, true},
      {{512, 1024, 2048}, 5, 8, 64, true},  {{512, 1024, 2048}, 5, 2, 64, false},   // clusters
      {{512, 1024, 2048}, 5, 16, 16, true}, {{512, 1024, 2048}, 3, 16, 16, false},  // an H200's
      {{512, 1024, 2048}, 3, 17, 16, true}, {{1024, 1024}, 3, 16, 8, false},
      {{384, 768, 1536}, 5, 16, 16, false}, {{384, 768, 1536}, 5, 24, 16, true},  // within 5 %
      {{64, 128, 256}, 5, 64, 16, false},   {{64, 128, 256}, 5, 256, 16, true},
      {{128, 256, 384}, 5, 32, 16, false},  {{128, 256, 384}, 5, 64, 16, true},
      {{32, 64}, 3, 256, 128, true},        {{256, 512, 1024}, 7, 16, 16, false},
      {{256, 512, 1024}, 7, 64, 16, true},  {{96, 192, 320}, 9, 16, 16, false},
      {{256, 512, 1024}, 5, 32, 16, true},  {{256, 512, 1024}, 5, 12, 48, true},
      {{384, 768, 1536}, 5, 32, 16, true},  {{64, 128, 256}, 5, 256, 64, true},
      {{128, 256, 384}, 5, 256, 16, true},  {{96, 192, 384}, 5, 64, 16, true},
      {{96, 192, 384}, 5, 32, 16, false},   {{128, 256, 384}, 5, 32, 24, false},  // teams
      {{96, 192, 384}, 7, 64, 16, true},    {{160}, 7, 64, 27, true},
      {{320, 640, 1280}, 7, 28, 4, false},  {{320, 640, 1280}, 7, 4, 4, false},  // within 4 %; phases
      {{256, 512, 1024}, 9, 8, 16, true},   {{48, 96, 192}, 5, 256, 16, false},
      {{320, 480, 960}, 5, 8, 16, false},   {{320, 480, 960}, 5, 2, 16, false},
      {{264, 528, 1056}, 5, 128, 16, true}, {{200, 400, 800}, 5, 64, 16, true},  // odd groups
      {{24, 48, 96}, 9, 64, 48, false},     {{56, 112}, 9, 28, 6, false},
      {{328, 656, 1312}, 5, 4, 16, false},  {{252, 504}, 5, 256, 16, false},
      {{256, 512, 1024}, 5, 1, 4096, true},  // nothing else fits
  };
  for (const auto& row : rows) {
    Config c = {2, static_cast<int>(row.widths.size()), {}, row.kernel, row.widths[0] == 252 ? 4 : 8, 256, 132, true};
    std::copy(row.widths.begin(), row.widths.end(), c.down_dims);
    const Plan plan = make_plan(c, DType::kBFloat16);
    EXPECT_EQ(layers_pay(plan, row.batch, row.horizon, kHopper), row.hopper)
        << row.widths[0] << " kernel " << row.kernel << " " << row.batch << " x " << row.horizon;
  }
}

// In float32, as measured on an H200: three rounds of a GEMM begin to pay at more samples, by warp-level MMAs at
// still more, and always where a layer would be two launches.
TEST(LayersPay, InFloat32) {
  struct {
    const Config& config;
    int batch, horizon;
    bool pay, without_wgmma;
  } const rows[] = {
      {kHeadline, 1, 16, false, false},  {kHeadline, 28, 16, false, false},  {kHeadline, 64, 16, false, false},
      {kHeadline, 256, 16, true, false}, {kLeRobot, 2, 64, false, false},    {kLeRobot, 64, 64, true, false},
      {kLeRobot, 64, 16, true, false},   {kLeRobot, 256, 16, true, false},   {kLeRobot, 1, 128, false, false},
      {kHeadline, 1, 256, false, false}, {kManiSkill, 64, 16, false, false}, {kLeRobot, 1, 512, true, true}};
  Device other = kHopper;
  other.hopper = other.clusters = false, other.team_clusters = 0;
  for (const auto& row : rows) {
    const Plan plan = make_plan(row.config, DType::kFloat32);
    EXPECT_EQ(layers_pay(plan, row.batch, row.horizon, kHopper), row.pay)
        << row.config.down_dims[0] << " " << row.batch << " x " << row.horizon;
    EXPECT_EQ(layers_pay(plan, row.batch, row.horizon, other), row.without_wgmma)
        << row.config.down_dims[0] << " " << row.batch << " x " << row.horizon;
  }
  Config longer = kHeadline;
  longer.kernel_size = 11;
  EXPECT_FALSE(layers_pay(make_plan(longer, DType::kFloat32), 256, 16, kHopper));
}

// As measured with code for 8.0 on an H200: layers begin at several times as many samples.
TEST(LayersPay, WithoutHoppersInstructions) {
  Device device = kHopper;
  device.hopper = device.clusters = false, device.team_clusters = 0;
  struct {
    const Config& config;
    int batch, horizon;
    bool pay;
  } const rows[] = {{kHeadline, 16, 16, false}, {kHeadline, 64, 16, false},  {kHeadline, 256, 16, false},
                    {kLeRobot, 8, 64, false},   {kLeRobot, 64, 64, true},    {kLeRobot, 16, 16, false},
                    {kLeRobot, 64, 16, false},  {kManiSkill, 64, 16, false}, {kManiSkill, 256, 16, false}};
  for (const auto& row : rows)
    EXPECT_EQ(layers_pay(make_plan(row.config, DType::kBFloat16), row.batch, row.horizon, device), row.pay)
        << row.config.down_dims[0] << " " << row.batch << " x " << row.horizon;
}

// Which networks are filled up, and to what; nothing: they keep their widths.
TEST(Widths, BySizeAndType) {
  const Device h100 = {132, 227 << 10, true, true, 15};
  const DType bf16 = DType::kBFloat16, fp32 = DType::kFloat32;
  struct {
    std::vector<int> own;
    int kernel, batch, horizon;
    DType dtype;
    std::vector<int> wide;
  } const rows[] = {
      {{192, 384, 640}, 3, 1, 16, bf16, {256, 512, 1024}},
      {{192, 384, 640}, 5, 1, 48, fp32, {256, 512, 1024}},
      {{240, 480, 960}, 3, 1, 48, bf16, {256, 512, 1024}},
      {{48, 96}, 5, 1, 48, bf16, {64, 96}},  // teams
      {{48, 96}, 9, 1, 16, bf16, {128, 256}},
      {{320, 480, 960}, 5, 1, 16, fp32, {512, 512, 1024}},
      {{80, 160, 320, 640}, 3, 1, 32, bf16, {128, 256, 512, 1024}},
      {{192, 384, 576, 576}, 3, 1, 16, fp32, {256, 512, 1024, 1024}},
      {{128, 256, 384}, 5, 1, 16, bf16, {128, 256, 512}},
      {{128, 256, 384}, 5, 16, 16, bf16, {}},  // teams
      {{64, 128, 256}, 5, 1, 16, bf16, {}},
      {{64, 128, 256}, 7, 1, 64, bf16, {128, 256, 512}},
      {{64, 64}, 5, 1, 32, bf16, {}},
      {{256, 512, 1024}, 5, 1, 16, bf16, {}},
      {{320, 640, 1280}, 5, 1, 16, fp32, {}},
      {{320, 640, 1280}, 5, 1, 16, bf16, {512, 1024, 2048}},
      {{320, 640, 1280}, 5, 2, 16, bf16, {}},
      {{320, 640, 1280}, 5, 8, 16, bf16, {512, 1024, 2048}},
      {{320, 640, 1280}, 5, 16, 16, bf16, {}},  // by layers
      {{80}, 3, 6, 4, bf16, {128}},
      {{56, 112}, 9, 28, 6, bf16, {64, 128}},
      {{80, 160, 320}, 5, 8, 16, bf16, {96, 160, 320}},
      {{160, 240, 480}, 5, 6, 16, bf16, {256, 256, 512}},
      {{192, 192, 384}, 5, 12, 12, bf16, {}},
      {{128, 256, 512}, 7, 2, 24, bf16, {256, 512, 1024}},
      {{160, 320, 480, 720}, 3, 8, 8, bf16, {256, 512, 512, 1024}},  // within 4 % of teams
      {{264, 528, 1056}, 5, 8, 16, bf16, {512, 1024, 2048}},
      {{160, 240, 360}, 5, 1, 16, bf16, {256, 256, 512}},  // groups of an odd number of channels
      {{160, 240, 360}, 5, 8, 16, bf16, {160, 256, 384}},
      {{200, 400, 800}, 5, 1, 16, bf16, {256, 512, 1024}},
      {{200, 400}, 5, 4, 256, bf16, {}},  // by layers, whose norms share large groups
      {{520}, 5, 2, 48, bf16, {1024}},
      {{160, 240, 360}, 5, 1, 48, fp32, {256, 256, 512}},  // phases with whole slices
      {{56, 112}, 9, 256, 6, bf16, {64, 128}},             // phases of 1536 columns
      {{104, 208, 312, 624}, 9, 64, 32, bf16, {}},         // by layers
      {{128, 256, 384, 384, 768}, 1, 1, 48, bf16, {128, 256, 512, 512, 1024}},
      {{40, 1032, 1032}, 5, 4, 16, fp32, {64, 1056, 1056}},  // powers of two: 15 times the weights
      {{16, 32}, 3, 1, 16, fp32, {32, 32}},                  // and eight times the channels
      {{192, 384, 640}, 3, 0, 16, bf16, {}},
  };
  for (const auto& row : rows) {
    Config c = {7, static_cast<int>(row.own.size()), {}, row.kernel, 8, 128, 132, true};
    std::copy(row.own.begin(), row.own.end(), c.down_dims);
    const Config got = widths_for(c, row.dtype, row.batch, row.horizon, /*layers=*/true, h100);
    const auto& wide = row.wide.empty() ? row.own : row.wide;
    EXPECT_TRUE(std::equal(wide.begin(), wide.end(), got.down_dims))
        << row.own[0] << " " << row.batch << " x " << row.horizon;
    EXPECT_EQ(got.widened(), !row.wide.empty());
    if (got.widened()) {
      EXPECT_TRUE(std::equal(row.own.begin(), row.own.end(), got.own_dims));
    }
  }
}

// What an exported loop runs, which has no layers.
TEST(Widths, WithoutLayers) {
  const Config c = {7, 3, {200, 400, 800}, 5, 8, 128, 132, true};
  const Device h100 = {132, 227 << 10, true, true, 15};
  EXPECT_FALSE(widths_for(c, DType::kBFloat16, 20, 48, /*layers=*/true, h100).widened());
  EXPECT_TRUE(widths_for(c, DType::kBFloat16, 20, 48, /*layers=*/false, h100).widened());
}

TEST(PathTime, IsInfiniteWhereAPathDoesNotServe) {
  const Plan plan = make_plan(kHeadline, DType::kBFloat16);
  EXPECT_TRUE(std::isinf(path_time(plan, 1, 16, Path::kTeams, kHopper)));
  EXPECT_TRUE(std::isinf(path_time(plan, 1, 1 << 14, Path::kPhases, kHopper)));
  EXPECT_TRUE(std::isfinite(path_time(plan, 1, 1 << 14, Path::kLayered, kHopper)));
  EXPECT_LT(layers_time(plan, 64, 16, kHopper), path_time(plan, 64, 16, Path::kPhases, kHopper));
}

TEST(ChoosePath, NarrowNetworksRunInTeams) {
  for (const Config& c : {kManiSkill, kSimpleDp3})
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      const Plan plan = make_plan(c, dtype);
      for (const Device& d : {kHopper, kA100, kOrin}) EXPECT_EQ(choose_path(plan, 1, 16, d), Path::kTeams);
      EXPECT_EQ(choose_path(plan, 16, 16, kHopper), Path::kTeams);
      EXPECT_EQ(choose_path(plan, 256, 16, kHopper), Path::kPhases);
    }
  const Plan narrow = make_plan(kManiSkill, DType::kFloat32), wider = make_plan(kSimpleDp3, DType::kFloat32),
             bf16 = make_plan(kManiSkill, DType::kBFloat16), wide = make_plan(kHeadline, DType::kBFloat16);
  EXPECT_EQ(choose_path(narrow, 1, 16, kHopper), Path::kTeams);
  EXPECT_EQ(choose_path(narrow, 1, 16, {132, 227 << 10}), Path::kTeams);  // in words
  EXPECT_EQ(choose_path(narrow, 1, 16, kA100), Path::kPhases);            // has no room for the slabs
  EXPECT_EQ(choose_path(wider, 1, 16, kHopper), Path::kTeams);
  EXPECT_EQ(choose_path(wider, 2, 16, kHopper), Path::kTeams);
  EXPECT_EQ(choose_path(make_plan({7, 3, {256, 256, 256}, 3, 8, 64, 84, true}, DType::kBFloat16), 16, 16, kHopper),
            Path::kTeams);
  EXPECT_EQ(choose_path(wider, 33, 16, kHopper), Path::kPhases);  // three launches
  EXPECT_EQ(choose_path(wide, 3, 32, {132, 227 << 10}), Path::kPhases);
  EXPECT_EQ(choose_path(bf16, 64, 16, kHopper), Path::kTeams);
}

// 15 clusters of 8 blocks fit on an H200, and 16 teams that hand over by words: where a cluster has no room for two
// samples, 16 of them go by words.
TEST(ChoosePath, SixteenSamplesOneATeam) {
  const Device h200 = {132, 227 << 10, true, true, 15};
  const Plan plan = make_plan(kManiSkill, DType::kBFloat16), narrow = make_plan(kManiSkill, DType::kFloat32);
  const TeamCall two = team_call(plan, 16, 16, h200), one = team_call(plan, 16, 24, h200),
                 wide = team_call(narrow, 16, 16, h200), few = team_call(narrow, 15, 16, h200);
  EXPECT_TRUE(two.clusters && two.samples == 16);
  EXPECT_TRUE(!one.clusters && one.samples == 16);
  EXPECT_TRUE(!wide.clusters && wide.samples == 16);
  EXPECT_TRUE(few.clusters && few.samples == 15);
}

}  // namespace
}  // namespace dpa::kernels::unet1d
