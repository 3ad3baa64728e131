// The plan of the packed U-Net: what it lists fits together, reads every weight once, and writes no byte twice.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <string>

#include "kernels/plans/unet1d/call.h"
#include "kernels/plans/unet1d/loop.h"
#include "kernels/plans/unet1d/resident_layout.h"

namespace dpa::kernels::unet1d {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3};

/// Action, levels, widths, kernel, groups, embedding, condition, FiLM's scale: odd ones beside the usual.
const Config kConfigs[] = {
    {2, 3, {32, 64, 128}, 5, 8, 16, 6, true},  // every block but the middle widens
    {1, 1, {8}, 3, 8, 4, 0, false},            // a single level
    {7, 2, {24, 24}, 1, 4, 6, 3, false},       // blocks that keep their width
    {8, 3, {8, 8, 16}, 5, 8, 8, 1, true},      // as many actions as channels: no residual convolution at the head
    {3, 5, {16, 32, 64, 32, 16}, 3, 8, 12, 0, true},  // as deep as it goes; narrow again
    {2, 3, {48, 96, 48}, 7, 3, 10, 5, true},          // three groups
    {3, 2, {256, 512}, 5, 16, 16, 6, true},           // two groups a slice
    {3, 2, {32, 96}, 3, 32, 16, 6, true},             // no slices: of fewer than 16 channels
};

class EveryPlan : public testing::TestWithParam<std::tuple<Config, DType>> {
 protected:
  Plan plan = make_plan(std::get<0>(GetParam()), std::get<1>(GetParam()));
  void SetUp() override { ASSERT_EQ(plan.error, ""); }
};

TEST_P(EveryPlan, HasTheNetworksConvolutions) {
  const int levels = plan.config.levels;
  // Two blocks of two a level going down, two in the middle, two a level but the first going up, a convolution between
  // levels, and the last one; the very first is the head.
  EXPECT_EQ(plan.convs.size(), 4 * levels + 4 + 4 * (levels - 1) + 2 * (levels - 1) + 1 - 1);
  EXPECT_LE(static_cast<int>(plan.convs.size()), kMaxConvs);
  std::set<std::string> names;
  for (const auto& weight : plan.weights) names.insert(weight.name);
  EXPECT_EQ(names.size(), plan.weights.size()) << "a weight is listed twice";
}

TEST_P(EveryPlan, IsAChain) {
  int level = 0, channels = plan.config.down_dims[0];
  bool residual = true;  // the head leaves one
  const Conv* skips[kMaxLevels] = {};
  for (size_t i = 0; i < plan.convs.size(); ++i) {
    const Conv& conv = plan.convs[i];
    EXPECT_EQ(conv.level_in, level) << i;
    EXPECT_EQ(conv.channels_in, channels) << i;
    EXPECT_EQ(conv.level_out - conv.level_in, conv.upsample ? -1 : conv.stride - 1) << i;
    if (conv.skip_in >= 0) {
      ASSERT_LT(conv.skip_in, plan.config.levels) << i;
      ASSERT_NE(skips[conv.skip_in], nullptr) << i;
      EXPECT_EQ(skips[conv.skip_in]->channels_out, conv.channels_skip) << i;
      EXPECT_EQ(skips[conv.skip_in]->level_out, conv.level_in) << i;
    } else {
      EXPECT_EQ(conv.channels_skip, 0) << i;
    }
    if (conv.add) {
      EXPECT_TRUE(residual) << i << " adds a residual that nothing has left";
      residual = false;
    }
    if (conv.keep || (conv.num_segments == 2 && !conv.upsample)) residual = true;
    if (conv.norm >= 0) {
      EXPECT_EQ(conv.channels_out % conv.groups, 0) << i;
    }
    if (conv.skip >= 0) skips[conv.skip] = &conv;
    level = conv.level_out, channels = conv.channels_out;
  }
  EXPECT_EQ(level, 0);
  EXPECT_EQ(channels, plan.config.down_dims[0]);
}

TEST_P(EveryPlan, SlicesCoverTheChannels) {
  EXPECT_TRUE(plan.slices_in == 1 || (plan.slices_in == 8 && plan.config.num_groups % 8 == 0));
  for (const Conv& conv : plan.convs) {
    const Tiling t = tiling(plan, conv);
    EXPECT_EQ(t.rows * plan.slices_out, conv.channels_out);
    EXPECT_EQ(t.in * conv.slices_in, conv.channels_in);
    EXPECT_EQ(t.skip * conv.slices_in, conv.channels_skip);
    if (plan.slices_in == 8) {
      EXPECT_EQ(conv.slices_in, 8);
    }
    EXPECT_GE(t.row_tiles * 16, t.rows);
    EXPECT_GE(t.in_steps * 16, t.in);
    EXPECT_GE(t.skip_steps * 16, t.skip);
  }
}

/// Calls `read(place)` for every element of the original that the item copies or tiles.
void for_each_source(const CopyItem& item, const std::function<void(int64_t)>& read) {
  for (int i = 0; i < item.n[0]; ++i)
    for (int j = 0; j < item.n[1]; ++j)
      for (int l = 0; l < item.n[2]; ++l)
        read(item.offset + i * item.stride[0] + j * item.stride[1] + l * item.stride[2]);
}
void for_each_source(const Conv& conv, const TileItem& item, const std::function<void(int64_t)>& read) {
  for (int out = 0; out < conv.channels_out; ++out)
    for (int in = 0; in < conv.channels_in + conv.channels_skip; ++in)
      for (int tap = 0; tap < conv.segments[item.segment].taps; ++tap)
        read(out * item.stride_out + in * item.stride_in + (item.tap_first + tap * item.tap_step) * item.stride_tap);
}

// A norm does not see what a group's biases share; a residual's bias, or one in front of none, is as it is.
TEST_P(EveryPlan, BiasesInFrontOfANormAreCopiedBesideTheirGroup) {
  auto groups_of = [&](int64_t bias) {
    for (const CopyItem& item : plan.copies)
      if (item.destination == plan.floats + 4 * bias) return std::pair(item.groups, item.counted);
    return std::pair(-1, -1);
  };
  const Config& c = plan.config;
  EXPECT_EQ(groups_of(plan.head.bias), std::pair(c.num_groups, c.width(0).own / c.num_groups));
  for (const Conv& conv : plan.convs) {
    const auto normed = conv.norm < 0 ? std::pair(0, 0) : std::pair(conv.groups, conv.counted / conv.groups);
    EXPECT_EQ(groups_of(conv.bias[0]), normed);
    if (conv.num_segments == 2) EXPECT_EQ(groups_of(conv.bias[1]), std::pair(0, 0));
  }
}

TEST_P(EveryPlan, ReadsEveryWeightOnce) {
  std::vector<std::vector<int>> reads;
  for (const auto& weight : plan.weights)
    reads.emplace_back(std::accumulate(weight.shape.begin(), weight.shape.end(), size_t{1}, std::multiplies<>()), 0);
  const auto reader = [&](int weight) { return [&reads, weight](int64_t place) { reads[weight].at(place) += 1; }; };
  for (const auto& item : plan.copies)
    if (item.weight >= 0) for_each_source(item, reader(item.weight));
  for (const auto& item : plan.tiles)
    if (item.weight >= 0) for_each_source(plan.convs[item.conv], item, reader(item.weight));
  for (size_t w = 0; w < reads.size(); ++w)
    EXPECT_EQ(static_cast<size_t>(std::count(reads[w].begin(), reads[w].end(), 1)), reads[w].size())
        << plan.weights[w].name;
}

/// Bytes [first, last) of the packed buffer.
using Range = std::pair<int64_t, int64_t>;

std::vector<Range> written(const Plan& plan) {
  std::vector<Range> ranges;
  for (const Conv& conv : plan.convs) {
    const Tiling t = tiling(plan, conv);
    const int64_t tap =
        int64_t{plan.slices_out} * conv.slices_in * t.steps_per_tap() * t.row_tiles * 256 * element_bytes(plan.dtype);
    for (int s = 0; s < conv.num_segments; ++s)
      ranges.emplace_back(conv.segments[s].weights, conv.segments[s].weights + tap * conv.segments[s].taps);
    const int64_t scale = plan.floats + 4 * conv.scale;
    if (conv.scale >= 0) ranges.emplace_back(scale, scale + int64_t{4} * conv.num_segments * conv.channels_out);
  }
  for (const CopyItem& item : plan.copies) {
    const int64_t bytes = item.to_float ? 4 : element_bytes(dense_dtype(plan.dtype));
    ranges.emplace_back(item.destination, item.destination + bytes * item.n[0] * item.n[1] * item.n[2]);
  }
  ranges.emplace_back(plan.stamp, plan.stamp + kStampBytes);
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

TEST_P(EveryPlan, PartsTouchButDoNotOverlap) {
  constexpr int64_t kAlignment = 128;
  int64_t end = 0;
  for (const auto& [first, last] : written(plan)) {
    EXPECT_GE(first, end) << "two parts share bytes";
    EXPECT_LT(first - end, kAlignment) << "bytes that nobody writes";
    end = last;
  }
  EXPECT_LE(end, plan.packed_bytes);
  EXPECT_LT(plan.packed_bytes - end, kAlignment);
}

TEST_P(EveryPlan, TilesAreAlignedForVectorLoads) {
  for (const Conv& conv : plan.convs)
    for (int s = 0; s < conv.num_segments; ++s) EXPECT_EQ(conv.segments[s].weights % 128, 0);
  for (const int64_t offset : {plan.floats, plan.step_weights[0], plan.step_weights[1], plan.film_step, plan.film_cond})
    EXPECT_EQ(offset % 128, 0);
}

INSTANTIATE_TEST_SUITE_P(Unet1d, EveryPlan, testing::Combine(testing::ValuesIn(kConfigs), testing::ValuesIn(kDTypes)));

TEST(TileIndex, IsAPermutation) {
  std::set<int> places;
  for (int row = 0; row < 16; ++row)
    for (int channel = 0; channel < 16; ++channel) places.insert(tile_index(row, channel));
  EXPECT_EQ(places.size(), 256u);
  EXPECT_EQ(*places.begin(), 0);
  EXPECT_EQ(*places.rbegin(), 255);
}

// Hopper, whose weights come by bulk copies; and chips with fewer multiprocessors, where blocks merge slices.
TEST(Resident, ItsPartsFitTheDevice) {
  const Device devices[] = {{132, 227 << 10, true}, {132, 227 << 10}, {128, 99 << 10}, {108, 163 << 10},
                            {82, 99 << 10},         {46, 163 << 10},  {16, 163 << 10}};
  int fitting[std::size(devices)] = {};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3})
    for (const int widest : {512, 1024, 2048})
      for (int horizon = 4; horizon <= 64; horizon += 4) {
        const Config config = {16, 3, {widest / 4, widest / 2, widest}, 5, 8, 16, 6, true};
        const Plan plan = make_plan(config, dtype);
        for (size_t i = 0; i < std::size(devices); i++) {
          const Device& d = devices[i];
          const ResidentLayout y = resident_layout(plan, horizon, d);
          const bool chosen = y.fits && (d.hopper || y.blocks <= d.multiprocessors);
          if (!chosen) continue;
          fitting[i]++;
          const std::string where = "device " + std::to_string(i) + ", widest " + std::to_string(widest) +
                                    ", horizon " + std::to_string(horizon);
          EXPECT_EQ(y.blocks << y.merged_log2, plan.slices_out * plan.slices_in) << where;
          EXPECT_LE(y.shared_bytes, d.shared_bytes) << where;
          const int read = y.pairs * (256 >> y.solo[0].half_log2) + config.kernel_size / 2;  // by the first convolution
          EXPECT_LE(y.sample + read * config.action_dim * 4, y.shared_bytes) << where;
          EXPECT_LE(y.stages, kMaxStages) << where;
          EXPECT_EQ(y.stages > 0, d.hopper) << where;  // elsewhere no weights go through shared memory
          EXPECT_EQ(y.at_once > 0, d.hopper) << where;
          EXPECT_LE(y.at_once, y.stages) << where;
          const int64_t tail = int64_t{y.blocks} * horizon * config.action_dim;
          EXPECT_LE(y.tail_message + tail, y.message_words) << where;
          for (int l = 1; l <= y.count; l++) {
            const int rows = y.solo[l].shape >> 4, columns = y.solo[l].columns;
            const int share = d.hopper ? kSoloShareFloats * y.pairs : y.share;
            EXPECT_LE(columns * (16 * rows + 4), share) << where;
            if (d.hopper) {
              EXPECT_LE(kConsumerWarps * rows * y.tile_bytes, y.stages * kStageBytes) << where;  // a step of all warps
            }
            EXPECT_EQ(rows << log2_of(y.blocks / kSlicesIn), y.solo[l].channels / 16) << where;
          }
        }
      }
  for (const int n : fitting) EXPECT_GT(n, 0);
}

// A thread has no more channel pairs than the horizon needs, with bulk copies and without.
TEST(Resident, AThreadHasAsManyPairsAsAHorizonNeeds) {
  for (const bool bulk : {true, false})
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3})
      for (int pairs = 1; pairs <= 4; pairs++) {
        const Plan plan = make_plan({16, 3, {256, 512, 1024}, 5, 8, 16, 6, true}, dtype);
        EXPECT_EQ(resident_layout(plan, 16 * pairs, {132, 227 << 10, bulk}).pairs, pairs) << bulk;
      }
}

// What a norm counts: of a group that is filled up, an odd number of channels too; of several groups in a slice, one's.
TEST(Resident, NormsCountTheNetworksOwnChannels) {
  const Device hopper = {132, 227 << 10, true};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3})
    for (const bool odd : {false, true}) {
      Config config = {16, 3, {256, 512, 1024}, 5, 8, 16, 6, true};
      const int own[] = {odd ? 200 : 208, 400, 800};
      std::copy_n(own, 3, config.own_dims);
      const Plan plan = make_plan(config, dtype);
      const ResidentLayout y = resident_layout(plan, 16, hopper);
      ASSERT_TRUE(y.fits);
      for (int l = 1; l <= y.count; l++) {
        const Conv& conv = plan.convs[l - 1];
        const int times = 16 >> conv.level_out;
        EXPECT_EQ(y.solo[l].inverse_count, 1.0f / static_cast<float>(times * conv.counted / 8));
        EXPECT_EQ(2 * y.solo[l].counted - (y.solo[l].flags & kSoloOdd ? 1 : 0), conv.counted / 8);
        EXPECT_EQ(y.solo[l].flags >> kSoloGroupShift, y.solo[l].half_log2);
      }
      EXPECT_EQ(y.parts, odd && dtype == DType::kFloat32);
    }
  for (const int groups : {16, 32}) {
    const Plan plan = make_plan({16, 3, {256, 512, 1024}, 5, groups, 16, 6, true}, DType::kFloat32);
    const ResidentLayout y = resident_layout(plan, 16, hopper);
    ASSERT_TRUE(y.fits);
    for (int l = 1; l <= y.count; l++) {
      const Conv& conv = plan.convs[l - 1];
      if (conv.norm < 0) continue;
      const int group_log2 = y.solo[l].flags >> kSoloGroupShift;
      EXPECT_EQ(2 * y.solo[l].counted, conv.channels_out / conv.groups);
      EXPECT_EQ(2 << group_log2, conv.channels_out / conv.groups);
      EXPECT_EQ(y.solo[l].half_log2 - group_log2, log2_of(conv.groups / 8));
    }
    EXPECT_TRUE(y.parts);
  }
  for (const int groups : {4, 24, 64})
    EXPECT_FALSE(
        resident_layout(make_plan({16, 2, {384, 768}, 5, groups, 16, 6, true}, DType::kFloat32), 16, hopper).fits);
}

// A widened network is the wide one but for what GroupNorm counts, and takes the weights of the narrow one.
TEST(WidenedPlan, IsThatOfItsWidthsWithTheNetworksOwnWeights) {
  for (const DType dtype : kDTypes) {
    const Config narrow{3, 3, {192, 384, 640}, 3, 8, 16, 6, true}, wide{3, 3, {256, 512, 1024}, 3, 8, 16, 6, true};
    Config both = wide;
    std::copy_n(narrow.down_dims, 3, both.own_dims);
    const Plan plan = make_plan(both, dtype), own = make_plan(narrow, dtype), full = make_plan(wide, dtype);
    ASSERT_EQ(plan.error, "");
    EXPECT_EQ(plan.packed_bytes, full.packed_bytes);
    ASSERT_EQ(plan.convs.size(), own.convs.size());
    for (size_t i = 0; i < plan.convs.size(); ++i) {
      EXPECT_EQ(plan.convs[i].channels_out, full.convs[i].channels_out) << i;
      EXPECT_EQ(plan.convs[i].counted, own.convs[i].channels_out) << i;
    }
    ASSERT_EQ(plan.weights.size(), own.weights.size());
    for (size_t i = 0; i < plan.weights.size(); ++i) {
      const auto &a = plan.weights[i], &b = own.weights[i], &c = full.weights[i];
      EXPECT_EQ(a.name, b.name);
      EXPECT_EQ(a.shape, b.shape) << a.name;
      for (size_t d = 0; d < a.shape.size(); ++d) {
        const auto fill = d < 2 ? a.fill[d] : WeightInfo::Fill();
        EXPECT_EQ(fill.groups ? fill.groups * fill.own : a.shape[d], b.shape[d]) << a.name;
        EXPECT_EQ(fill.groups ? fill.groups * fill.width : a.shape[d], c.shape[d]) << a.name;
      }
    }
  }
}

// Widths of which two become one: the convolutions between them stay.
TEST(WidenedPlan, HasTheConvolutionsOfTheNetwork) {
  for (const DType dtype : kDTypes) {
    const Config narrow{3, 3, {320, 480, 960}, 3, 8, 16, 6, true};
    Config both{3, 3, {512, 512, 1024}, 3, 8, 16, 6, true};
    std::copy_n(narrow.down_dims, 3, both.own_dims);
    const Plan plan = make_plan(both, dtype), own = make_plan(narrow, dtype);
    ASSERT_EQ(plan.error, "");
    ASSERT_EQ(plan.convs.size(), own.convs.size());
    for (size_t i = 0; i < plan.convs.size(); ++i) {
      const Conv &a = plan.convs[i], &b = own.convs[i];
      EXPECT_EQ(a.num_segments, b.num_segments) << i;
      EXPECT_EQ(a.counted, b.channels_out) << i;
      EXPECT_EQ(a.channels_out, b.channels_out == 960 ? 1024 : 512) << i;
      EXPECT_EQ(std::tie(a.keep, a.add, a.skip, a.skip_in), std::tie(b.keep, b.add, b.skip, b.skip_in)) << i;
    }
    ASSERT_EQ(plan.weights.size(), own.weights.size());
    for (size_t i = 0; i < plan.weights.size(); ++i) {
      EXPECT_EQ(plan.weights[i].name, own.weights[i].name);
      EXPECT_EQ(plan.weights[i].shape, own.weights[i].shape) << plan.weights[i].name;
    }
  }
}

TEST(WidenedPlan, RefusesWhatWouldBeAnotherNetwork) {
  const auto error = [](int actions, std::vector<int> own, std::vector<int> wide, int groups = 8) {
    Config c{actions, static_cast<int>(own.size()), {}, 3, groups, 16, 0, true};
    std::copy(wide.begin(), wide.end(), c.down_dims), std::copy(own.begin(), own.end(), c.own_dims);
    return make_plan(c, DType::kFloat32).error;
  };
  EXPECT_EQ(error(3, {192, 384}, {256, 512}), "");
  EXPECT_EQ(error(3, {192, 192}, {256, 256}), "");
  EXPECT_EQ(error(3, {320, 480}, {512, 512}), "");  // a convolution between them, as there was
  const char* refused = "widths that are widened must leave the network's structure as it is";
  EXPECT_EQ(error(192, {192, 384}, {256, 512}), refused);  // no residual convolution at the head
  EXPECT_EQ(error(3, {192, 192}, {256, 512}), refused);    // none between equal levels
  EXPECT_EQ(error(3, {384, 192}, {512, 256}), refused);
  EXPECT_EQ(error(3, {384, 192}, {384, 192}), "");
  EXPECT_EQ(error(3, {384, 192}, {512, 512}), refused);  // none where a skip has as many channels
  EXPECT_EQ(error(3, {384, 192}, {512, 384}), refused);
  EXPECT_EQ(error(3, {264, 512}, {256, 512}), refused);     // narrower
  EXPECT_EQ(error(3, {192, 384}, {256, 512}, 4), refused);  // the last block has eight groups
  EXPECT_EQ(error(3, {192, 388}, {256, 512}), refused);
}

TEST(RefusedPlan, SaysWhyAndListsNothing) {
  const auto refusal = [](const std::function<void(Config&)>& corrupt) {
    Config config;
    corrupt(config);
    const Plan plan = make_plan(config, DType::kFloat32);
    EXPECT_TRUE(plan.convs.empty() && plan.weights.empty() && plan.packed_bytes == 0);
    return plan.error;
  };
  EXPECT_EQ(make_plan(Config(), DType::kFloat32).error, "");
  EXPECT_EQ(refusal([](Config& c) { c.action_dim = 0; }), "action_dim must be at least 1, got 0");
  EXPECT_EQ(refusal([](Config& c) { c.levels = 0; }), "down_dims must have 1 to 5 levels, got 0");
  EXPECT_EQ(refusal([](Config& c) { c.levels = 6; }), "down_dims must have 1 to 5 levels, got 6");
  EXPECT_EQ(refusal([](Config& c) { c.kernel_size = 4; }), "kernel_size must be odd, got 4");
  EXPECT_EQ(refusal([](Config& c) { c.kernel_size = -1; }), "kernel_size must be odd, got -1");
  EXPECT_EQ(refusal([](Config& c) { c.num_groups = 0; }), "n_groups must be at least 1, got 0");
  EXPECT_EQ(refusal([](Config& c) { c.step_dim = 7; }), "diffusion_step_embed_dim must be even and at least 4, got 7");
  EXPECT_EQ(refusal([](Config& c) { c.step_dim = 2; }), "diffusion_step_embed_dim must be even and at least 4, got 2");
  EXPECT_EQ(refusal([](Config& c) { c.cond_dim = -1; }), "global_cond_dim must not be negative, got -1");
  EXPECT_EQ(refusal([](Config& c) { c.down_dims[1] = 500; }), "every width must be a multiple of n_groups, got 500");
  EXPECT_EQ(refusal([](Config& c) { c.num_groups = 3, c.down_dims[0] = 12, c.down_dims[1] = c.down_dims[2] = 24; }),
            "the first width must be a multiple of 8, the groups of the last block, got 12");
  EXPECT_EQ(make_plan(Config(), DType::kFloat64).error,
            "packed weights must be float32, float16, bfloat16 or float8_e4m3fn, got float64");
}

// A batch in parts: each begins at its own samples, of everything that has a row a sample.
TEST(LoopPart, BeginsAtItsFirstSample) {
  float values[64] = {};
  uint8_t mask[64] = {};
  LoopArguments all = {};
  all.batch = 5, all.horizon = 2, all.actions = 3, all.film_rows = 4, all.film_sample_stride = 7;
  all.initial = values, all.condition_mask = mask, all.film_step = values, all.film_cond = values;
  all.output = values, all.table = values;
  const LoopArguments part = loop_part(all, 3, 2);
  EXPECT_EQ(part.batch, 2);
  EXPECT_EQ(part.initial, values + 18);
  EXPECT_EQ(part.output, values + 18);
  EXPECT_EQ(part.condition_mask, mask + 18);
  EXPECT_EQ(part.film_step, values + 21);
  EXPECT_EQ(part.film_cond, values + 12);
  EXPECT_EQ(part.table, values);   // of every sample
  EXPECT_EQ(part.noise, nullptr);  // absent, and stays so
  EXPECT_EQ(part.condition_data, nullptr);
}

TEST(Reject, NamesTheRuleAndTheValues) {
  const Plan narrow = make_plan({2, 2, {32, 32}, 5, 8, 16, 0, true}, DType::kFloat32);
  EXPECT_EQ(reject(narrow, 0, 16, 0), "");
  EXPECT_EQ(reject(narrow, -1, 16, 1), "batch must not be negative, got -1");
  EXPECT_EQ(reject(narrow, 1, 16, -1), "steps must not be negative, got -1");
  EXPECT_EQ(reject(narrow, 1, 15, 1), "horizon must be a positive multiple of 2^(levels - 1) = 2, got 15");
  const Plan broad = make_plan({2, 1, {2048}, 5, 8, 16, 0, true}, DType::kFloat32);
  EXPECT_EQ(reject(broad, 1 << 16, 16, 1), "batch * horizon * channels must be below 2^31, got 2147483648");
  Plan refused;
  refused.error = "refused";
  EXPECT_EQ(reject(refused, 1, 16, 1), "refused");
}

TEST(Reject, ColumnsBeyondTheLayeredPathsGrid) {
  const Plan plan = make_plan({2, 2, {32, 32}, 5, 8, 16, 0, true}, DType::kFloat32);
  EXPECT_EQ(kMaxColumns, 2097120);
  EXPECT_EQ(reject(plan, kMaxColumns / 16, 16, 1), "");
  EXPECT_EQ(reject(plan, kMaxColumns / 16 + 1, 16, 1), "batch * horizon must be at most 2097120, got 2097136");
  EXPECT_EQ(reject(plan, 1, kMaxColumns + 2, 1), "batch * horizon must be at most 2097120, got 2097122");
  EXPECT_EQ(reject(plan, 2147483647, 2147483646, 1).substr(0, 29), "batch * horizon must be at mo");
}

}  // namespace
}  // namespace dpa::kernels::unet1d
