// How a convolution is cut into tiles: every row, tap and place once, within the kernels' limits.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/plans/conv1d/changes.h"
#include "kernels/plans/conv1d/mma_plan.h"
#include "kernels/plans/conv1d/plan.h"

namespace dpa::kernels::conv1d {
namespace {

Conv1d convolution(int64_t batch, int64_t length, int64_t y_channels, int64_t x_channels, int taps, int stride) {
  const int padding = taps == 4 ? 1 : taps / 2;
  return {DType::kBFloat16, batch,  (length + 2 * padding - taps) / stride + 1, y_channels, length, x_channels, taps,
          stride,           padding};
}

std::vector<Conv1d> convolutions() {
  std::vector<Conv1d> all;
  for (int64_t batch : {1, 3, 64, 1000}) {
    for (int64_t length : {4, 6, 16, 48, 64, 200}) {
      for (auto [taps, stride] : {std::pair{1, 1}, {3, 1}, {5, 1}, {3, 2}, {4, 2}})
        for (const auto dtype : {DType::kBFloat16, DType::kFloat32}) {  // weights of one part and of two
          all.push_back(convolution(batch, length, 256, 96, taps, stride));
          all.back().dtype = dtype;
        }
    }
  }
  return all;
}

TEST(RowTiles, CoverEveryRowOnce) {
  for (int limit : {64, 128}) {
    for (int64_t batch : {1, 2, 7, 65}) {
      for (int64_t length : {1, 3, 12, 64, 65, 128, 129, 300}) {
        const RowTiles tiles = row_tiles(batch, length, limit);
        EXPECT_LE(tiles.time * tiles.samples, limit);
        std::multiset<std::pair<int64_t, int64_t>> rows;
        for (int64_t i = 0; i < tiles.count; ++i) {
          for (int row = 0; row < tiles.time * tiles.samples; ++row) {
            const int64_t sample = i / tiles.per_sample * tiles.samples + row / tiles.time;
            const int64_t time = i % tiles.per_sample * tiles.time + row % tiles.time;
            if (sample < batch && time < length) rows.emplace(sample, time);
          }
        }
        EXPECT_EQ(rows.size(), static_cast<size_t>(batch * length)) << batch << " " << length << " " << limit;
        EXPECT_EQ(std::set(rows.begin(), rows.end()).size(), rows.size());
      }
    }
  }
}

// (time of y, tap, time of x) of every term of a convolution.
using Pairs = std::multiset<std::tuple<int64_t, int, int64_t>>;
Pairs pairs(const Conv1d& c) {
  Pairs all;
  for (int64_t t = 0; t < c.y_length; ++t) {
    for (int k = 0; k < c.taps; ++k) {
      const int64_t u = c.stride * t + k - c.padding;
      if (u >= 0 && u < c.x_length) all.emplace(t, k, u);
    }
  }
  return all;
}

TEST(ConvPlan, FpropAndDgradContractEveryPairOnce) {
  for (const Conv1d& c : convolutions()) {
    const ConvPlan fprop = plan_fprop(c, 132), dgrad = plan_dgrad(c, 132);
    Pairs by_fprop, by_dgrad;
    for (int64_t t = 0; t < c.y_length; ++t) {
      for (int i = 0; i < fprop.terms[0]; ++i) {
        const int64_t u = fprop.stride * t + fprop.shift[0][i];
        if (u >= 0 && u < c.x_length) by_fprop.emplace(t, fprop.tap[0][i], u);
      }
    }
    for (int64_t u = 0; u < c.x_length; ++u) {
      const int phase = static_cast<int>(u % dgrad.phases);
      for (int i = 0; i < dgrad.terms[phase]; ++i) {
        const int64_t t = u / dgrad.phases + dgrad.shift[phase][i];
        if (t >= 0 && t < c.y_length) by_dgrad.emplace(t, dgrad.tap[phase][i], u);
      }
    }
    EXPECT_EQ(by_fprop, pairs(c)) << c.x_length << " " << c.taps << " " << c.stride;
    EXPECT_EQ(by_dgrad, pairs(c)) << c.x_length << " " << c.taps << " " << c.stride;
  }
}

TEST(ConvPlan, Float32WeightsOfFewElementsComeInTwoParts) {
  for (const auto [channels, taps, parts] :
       {std::tuple{64, 5, 2}, {512, 1, 2}, {513, 1, 1}, {224, 5, 2}, {256, 5, 1}}) {
    Conv1d c = convolution(64, 16, channels, channels, taps, 1);
    EXPECT_EQ(weight_parts(c), 1);
    c.dtype = DType::kFloat32;
    for (const ConvPlan& plan : {plan_fprop(c, 132), plan_dgrad(c, 132), plan_normalised(c, channels / 8, 132)})
      EXPECT_EQ(plan.parts, parts) << channels;
    for (const MmaPlan& plan : {plan_mma_fprop(c, 132), plan_mma_dgrad(c, 132)})
      EXPECT_EQ(plan.conv.parts, parts) << channels;
    c.halves = true;
    EXPECT_EQ(weight_parts(c), 1);
  }
}

TEST(ConvPlan, SmallConvolutionsOfFloat32AreInFull) {
  Conv1d c = convolution(64, 16, 64, 32, 5, 1);
  EXPECT_FALSE(in_full(c));
  c.dtype = DType::kFloat32;
  EXPECT_TRUE(in_full(c));
  for (const MmaPlan& plan : {plan_mma_fprop(c, 1), plan_mma_dgrad(c, 1)})
    EXPECT_EQ(plan.conv.tile_rows * plan.conv.tile_columns, 64 * 64);
  c.batch = 205;
  EXPECT_FALSE(in_full(c));
  c.batch = 1, c.x_channels = 128;
  EXPECT_FALSE(in_full(c));
}

TEST(ConvPlan, EveryBlockOfAClusterHasSteps) {
  for (const Conv1d& c : convolutions()) {
    for (int multiprocessors : {1, 78, 114, 132}) {
      for (const ConvPlan& plan : {plan_fprop(c, multiprocessors), plan_dgrad(c, multiprocessors)}) {
        EXPECT_TRUE(plan.splits == 1 || plan.splits == 2 || plan.splits == 4 || plan.splits == 8);
        for (int p = 0; p < plan.phases; ++p) EXPECT_GE(plan.terms[p] * plan.chunks, plan.splits);
        const int64_t tiles = plan.rows.count * plan.phases * plan.column_tiles;
        EXPECT_TRUE(plan.splits == 1 || tiles * plan.splits <= multiprocessors) << tiles;
      }
      const WgradPlan gradient = plan_wgrad(c, multiprocessors);
      EXPECT_GE(gradient.rows.count, gradient.splits);
    }
  }
}

TEST(ConvPlan, OneBoxServesAllTerms) {
  for (const Conv1d& c : convolutions()) {
    for (const ConvPlan& plan : {plan_fprop(c, 132), plan_dgrad(c, 132)}) {
      if (!plan.together) {
        EXPECT_EQ(plan.reach, 0);
        continue;
      }
      EXPECT_LE((plan.rows.time + plan.reach) * plan.rows.samples, 2 * kTileRows);
      EXPECT_GE(plan.chunks, plan.splits);
      EXPECT_LE(plan.lowest, 0);  // time 0 of a side's one tap is in the box
      for (int i = 0; i < plan.terms[0]; ++i) {
        EXPECT_GE(plan.shift[0][i], plan.lowest);
        EXPECT_LE(plan.shift[0][i], plan.lowest + plan.reach);
        // The kernel goes from term to term by one distance.
        if (i > 0) {
          EXPECT_EQ(plan.shift[0][i] - plan.shift[0][i - 1], plan.shift[0][1] - plan.shift[0][0]);
        }
      }
    }
  }
  for (int level = 0; level < 3; ++level)
    for (int64_t batch : {64, 256, 1024})
      EXPECT_TRUE(plan_fprop(convolution(batch, 16 >> level, 256 << level, 256 << level, 5, 1), 132).together);
  EXPECT_FALSE(plan_fprop(convolution(64, 16, 256, 256, 3, 2), 132).together);
  EXPECT_TRUE(plan_fprop(convolution(64, 32, 256, 256, 5, 1), 132).together);
  EXPECT_TRUE(plan_fprop(convolution(64, 64, 512, 512, 3, 1), 132).together);
  EXPECT_FALSE(plan_fprop(convolution(64, 200, 512, 512, 3, 1), 132).together);  // a part of a sample
  EXPECT_FALSE(plan_fprop(convolution(64, 16, 256, 256, 1, 1), 132).together);
}

TEST(ConvPlan, SkipsOnlyTermsThatReadPadding) {
  for (const Conv1d& c : convolutions()) {
    for (bool is_fprop : {true, false}) {
      const ConvPlan plan = is_fprop ? plan_fprop(c, 132) : plan_dgrad(c, 132);
      const int64_t x_length = is_fprop ? c.x_length : c.y_length;
      for (int row = 0; plan.together && row < plan.rows.time * plan.rows.samples; ++row) {
        for (int i = 0; i < plan.terms[0]; ++i) {
          const int64_t time = row / plan.rows.samples + plan.shift[0][i];
          if (time < 0 || time >= x_length) continue;
          EXPECT_GE(i, plan.first_term[row / 64]);
          EXPECT_LT(i, plan.end_term[row / 64]);
        }
      }
    }
  }
  const ConvPlan plan = plan_fprop(convolution(64, 4, 1024, 1024, 5, 1), 132);  // two times a warpgroup
  EXPECT_EQ(plan.first_term[0], 1);
  EXPECT_EQ(plan.end_term[0], 5);
  EXPECT_EQ(plan.first_term[1], 0);
  EXPECT_EQ(plan.end_term[1], 4);
  const ConvPlan half = plan_fprop(convolution(16, 4, 1024, 1024, 5, 1), 132);  // no rows of the second warpgroup's
  EXPECT_EQ(half.first_term[1], half.end_term[1]);
}

TEST(ConvPlan, ClustersOfFourAndMoreFitTheDevice) {
  // 30 of four and 15 of eight fit the 132 multiprocessors of an H200, one block on each.
  for (int64_t batch : {16, 64, 128, 256, 512, 1024}) {
    for (int64_t channels : {256, 512, 1024, 2048}) {
      for (const ConvPlan& plan : {plan_fprop(convolution(batch, 4, channels, channels, 5, 1), 132),
                                   plan_dgrad(convolution(batch, 8, channels, channels, 4, 2), 132)}) {
        const int64_t clusters = plan.rows.count * plan.phases * plan.column_tiles;
        if (plan.splits >= 4) {
          EXPECT_LE(clusters, plan.splits == 4 ? 30 : 15);
        }
      }
    }
  }
}

TEST(ConvPlan, FillsTheDeviceAtTheNetworksSizes) {
  // The levels of the 80 M network have 64 tiles of 128 x 128 at batch 256 and 16 at batch 64, or twice as many of half
  // the columns.
  const auto blocks = [](const ConvPlan& plan) { return plan.rows.count * plan.column_tiles * plan.splits; };
  for (int level = 0; level < 3; ++level) {
    const int64_t channels = 256 << level, length = 16 >> level;
    EXPECT_EQ(blocks(plan_fprop(convolution(64, length, channels, channels, 5, 1), 132)), 64);
    EXPECT_EQ(blocks(plan_fprop(convolution(256, length, channels, channels, 5, 1), 132)), 128);
    EXPECT_EQ(plan_fprop(convolution(1024, length, channels, channels, 5, 1), 132).tile_columns,
              level == 2 ? 256 : 128);
  }
}

// Tiles of 64 columns take no more of the device than those of 128, or half of it.
TEST(ConvPlan, NarrowTilesLeaveRoom) {
  int narrow = 0;
  for (int64_t batch : {16, 40, 64, 128, 256}) {
    for (int64_t length : {4, 8, 16, 32}) {
      for (int64_t channels : {64, 96, 128, 256, 384, 512, 1024}) {
        const Conv1d c = convolution(batch, length, channels, channels, 5, 1);
        for (const ConvPlan& plan : {plan_fprop(c, 132), plan_dgrad(c, 132), plan_normalised(c, channels / 8, 132)}) {
          if (plan.tile_columns != 64) continue;
          ++narrow;
          const int64_t wide = plan.rows.count * ceil_div(channels, 128);
          EXPECT_GT(channels, 64);
          EXPECT_LE(plan.column_step, 64);
          EXPECT_GE(plan.column_tiles * plan.column_step, channels);
          EXPECT_LE(plan.rows.count * plan.column_tiles * plan.splits, std::max<int64_t>(wide * kMaxSplits, 66));
          EXPECT_LE(plan.rows.count * plan.column_tiles * plan.splits, 132);
          EXPECT_GE(plan.chunks * c.taps, plan.splits * 2);
        }
      }
    }
  }
  EXPECT_GT(narrow, 100);
  const auto tile = [](int64_t batch, int64_t length, int64_t channels) {
    return plan_dgrad(convolution(batch, length, channels, channels, 5, 1), 132).tile_columns;
  };
  EXPECT_TRUE(tile(64, 16, 256) == 64 && tile(128, 16, 128) == 64 && tile(128, 4, 384) == 64);
  EXPECT_TRUE(tile(128, 8, 512) == 128 && tile(128, 4, 1024) == 128);  // more blocks, or longer ones
  // A group of 48 columns is a tile.
  EXPECT_EQ(plan_normalised(convolution(128, 4, 384, 384, 5, 1), 48, 132).column_step, 48);
}

TEST(StreamPlan, CoversTheGradientWithinTheDevice) {
  int streamed = 0;
  for (const int64_t batch : {1, 16, 64, 128, 1024})
    for (const int64_t length : {1, 4, 5, 16, 64, 70})
      for (const int64_t channels : {4, 250, 256, 516, 1024, 2048})
        for (const int taps : {1, 3, 5, 7})
          for (const int multiprocessors : {1, 66, 132}) {
            const Conv1d c = convolution(batch, length, channels, channels, taps, 1);
            if (!streams(c, multiprocessors)) continue;
            ++streamed;
            const StreamPlan plan = plan_stream(c, multiprocessors);
            EXPECT_GE(plan.tiles.y_tiles * kTileRows, channels);
            EXPECT_GE(plan.tiles.x_tiles * plan.tiles.x_channels, channels);
            EXPECT_LE(plan.tiles.rows.samples, kStreamSamples);
            EXPECT_TRUE(plan.blocks >= 1 && plan.blocks <= multiprocessors);
            EXPECT_LE(plan.blocks, plan.tiles.y_tiles * plan.tiles.x_tiles);
            EXPECT_TRUE(c.taps == 5 || c.taps == 7);
            EXPECT_EQ(c.x_channels % 4, 0);
          }
  EXPECT_GT(streamed, 100);
  EXPECT_EQ(plan_stream(convolution(128, 4, 1024, 1024, 5, 1), 132).blocks, 64);  // half of the device
  EXPECT_EQ(plan_stream(convolution(64, 16, 2048, 2048, 5, 1), 132).blocks, 128);
}

// A step contracts as many bytes, and the weight gradient's as many as eight samples of four times have.
TEST(Tf32, StepsCoverWhatIsContracted) {
  for (Conv1d c : convolutions()) {
    c.dtype = DType::kBFloat16;
    const ConvPlan half = plan_fprop(c, 132);
    c.dtype = DType::kFloat32;
    const ConvPlan plan = plan_fprop(c, 132);
    EXPECT_EQ(plan.chunks, (c.x_channels + 31) / 32);
    EXPECT_EQ(half.chunks, (c.x_channels + 63) / 64);
    const WgradPlan gradient = plan_wgrad(c, 132);
    const int64_t times = int64_t{gradient.rows.per_sample} * gradient.rows.time;
    EXPECT_TRUE(times >= c.y_length && times - gradient.rows.time < c.y_length);
    EXPECT_EQ(gradient.rows.count % gradient.rows.per_sample, 0);
    const int64_t samples = gradient.rows.count / gradient.rows.per_sample * gradient.rows.samples;
    EXPECT_TRUE(samples >= c.batch && samples - gradient.rows.samples < c.batch);
  }
}

Conv1d float_convolution(int64_t batch, int64_t length, int64_t y_channels, int64_t x_channels, int taps, int stride) {
  Conv1d c = convolution(batch, length, y_channels, x_channels, taps, stride);
  c.dtype = DType::kFloat32;
  return c;
}

TEST(InPlace, ManyWeightsForFewRows) {
  const auto reads = [](auto... sizes) { return reads_in_place(float_convolution(sizes...)); };
  EXPECT_TRUE(reads(64, 4, 2048, 2048, 5, 1));
  EXPECT_TRUE(reads(64, 8, 512, 512, 5, 1));
  EXPECT_TRUE(reads(64, 16, 2048, 2048, 5, 1));    // 1024 rows, 20 million weights
  EXPECT_FALSE(reads(128, 8, 1024, 1024, 5, 1));   // 5 million
  EXPECT_FALSE(reads(128, 16, 2048, 2048, 5, 1));  // 2048 rows
  EXPECT_FALSE(reads(16, 16, 256, 256, 5, 1));     // few weights
  EXPECT_FALSE(reads(16, 16, 1024, 1024, 1, 1));
  EXPECT_FALSE(reads(16, 16, 1024, 1024, 4, 2));
  EXPECT_FALSE(reads(16, 16, 1024, 1024, 3, 2));
  EXPECT_FALSE(reads(2, 200, 1024, 1024, 5, 1));  // no box holds a sample
  EXPECT_FALSE(reads(64, 2, 1024, 1024, 5, 1));
  EXPECT_FALSE(reads(16, 16, 1024, 1022, 5, 1));  // rows are no whole vectors
  EXPECT_FALSE(reads_in_place(convolution(64, 4, 2048, 2048, 5, 1)));
}

// A warp's eight outputs by four channels meet every bank once, within the words of their stage, of which two or more fit.
TEST(InPlace, WordsMeetEveryBankOnce) {
  for (const int channels : {512, 800, 2048})
    for (const int taps : {3, 5, 7})
      for (const bool dgrad : {false, true}) {
        Conv1d c = float_convolution(40, 8, channels, channels, taps, 1);
        ASSERT_TRUE(can_read_in_place(c));
        c.in_place = true;
        const ConvPlan plan = dgrad ? plan_dgrad(c, 132) : plan_fprop(c, 132);
        ASSERT_TRUE(plan.together && plan.phases == 1 && plan.parts == 1 && plan.tile_columns <= 128);
        for (int i = 0; i < taps; ++i) EXPECT_EQ(plan.tap[0][i], i);
        const InPlaceStage stage = in_place_stage(plan, taps, dgrad);
        EXPECT_LE(2 * stage.bytes, 9u * 128 * plan.tile_columns);  // kMaxWeights stages of packed weights
        EXPECT_EQ(stage.bytes % 128, 0u);
        EXPECT_LE(stage.width, 256);
        std::set<uint32_t> words;
        for (int tap = 0; tap < taps; ++tap)
          for (int output = 0; output < plan.tile_columns; output += 8)
            for (int channel = 0; channel < kInPlaceChannels; channel += 4) {
              std::set<uint32_t> banks;
              for (int lane = 0; lane < 32; ++lane) {
                const int n = output + lane / 4;
                const uint32_t at = n / kInPlaceOutputs * stage.of_outputs + n % kInPlaceOutputs * stage.of_output +
                                    (channel + lane % 4) * stage.of_channel + tap * 4;
                EXPECT_LT(at, stage.bytes);
                words.insert(at), banks.insert(at / 4 % 32);
              }
              EXPECT_EQ(banks.size(), 32u) << taps << " taps, output " << output << ", channel " << channel;
            }
        EXPECT_EQ(words.size(), static_cast<size_t>(taps * plan.tile_columns * kInPlaceChannels));
      }
}

// Pairs of float16 numbers: chunks as in 16 bits, each multiplied three times, by tiles whose sums fit twice into
// registers.
TEST(Halves, ThreeRoundsOfTheSameChunks) {
  int more = 0;
  for (Conv1d c : convolutions())
    for (const bool alone : {false, true}) {
      c.alone = alone, c.dtype = DType::kBFloat16, c.halves = false;
      const ConvPlan half[] = {plan_fprop(c, 132), plan_dgrad(c, 132)};
      c.dtype = DType::kFloat32, c.halves = true;
      const ConvPlan plan[] = {plan_fprop(c, 132), plan_dgrad(c, 132)};
      for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(plan[i].chunks, half[i].chunks);
        EXPECT_LE(plan[i].tile_columns, 128);
        EXPECT_LE(plan[i].splits, kRounds * plan[i].chunks * (plan[i].together ? 1 : plan[i].terms[0]));
        const int64_t blocks = plan[i].rows.count * plan[i].phases * plan[i].column_tiles * plan[i].splits;
        if (plan[i].splits > 1) EXPECT_LE(blocks, 132) << "others' sums find their place";
        more += plan[i].splits > half[i].splits;
      }
    }
  EXPECT_GT(more, 10) << "more boxes are divided among more blocks";
}

TEST(Serves, WhatTheKernelsAreCompiledFor) {
  Conv1d c = convolution(2, 16, 8, 8, 5, 1);
  EXPECT_TRUE(serves(c));
  Conv1d other = c;
  other.dtype = DType::kFloat32;
  EXPECT_TRUE(serves(other));
  other.dtype = DType::kFloat64;
  EXPECT_FALSE(serves(other));
  EXPECT_FALSE(serves(convolution(0, 16, 8, 8, 5, 1)));
  EXPECT_TRUE(serves(convolution(2, 16, 8, 8, 7, 1)));
  EXPECT_FALSE(serves(convolution(2, 16, 8, 8, 11, 1)));
  EXPECT_FALSE(serves(convolution(2, 16, 8, 8, 3, 3)));
  EXPECT_FALSE(serves(convolution(int64_t{1} << 31, 16, 8, 8, 3, 1)));
  c.padding = 5;
  EXPECT_FALSE(serves(c));
}

TEST(Changes, ARowAColumnATapAndABlockShow) {
  const std::tuple<int64_t, int64_t, int> shapes[] = {{64, 3, 1},     {2048, 1, 1},   {128, 64, 1},   {129, 64, 1},
                                                      {2048, 2, 5},   {7, 1777, 3},   {256, 256, 5},  {1024, 2048, 5},
                                                      {4096, 396, 1}, {2048, 512, 3}, {7936, 100, 1}, {512, 512, 9}};
  for (auto [d0, d1, taps] : shapes) {
    const ComparedElements elements{d0, d1, taps};
    ASSERT_LE(elements.count(), ComparedElements::kMost);
    std::set<int64_t> places, rows, columns, of_taps, blocks;
    for (int n = 0; n < elements.count(); ++n) {
      const int64_t place = elements.place(n), row = place / taps / d1, column = place / taps % d1;
      ASSERT_TRUE(0 <= place && place < d0 * d1 * taps);
      places.insert(place), rows.insert(row), columns.insert(column), of_taps.insert(place % taps);
      blocks.insert(row * 4 / d0 * 4 + column * 4 / d1);  // a sixteenth of the weight
    }
    EXPECT_EQ(static_cast<int64_t>(rows.size()), d0) << d0 << ' ' << d1 << ' ' << taps;
    EXPECT_EQ(static_cast<int64_t>(columns.size()), d1) << d0 << ' ' << d1 << ' ' << taps;
    EXPECT_EQ(static_cast<int>(of_taps.size()), taps) << d0 << ' ' << d1 << ' ' << taps;
    if (d0 >= 4 && d1 >= 4) EXPECT_EQ(blocks.size(), 16u) << d0 << ' ' << d1 << ' ' << taps;
    if (elements.all() <= ComparedElements::kMost) EXPECT_EQ(static_cast<int64_t>(places.size()), elements.all());
  }
  const ComparedElements wide{10000, 4, 1};  // more rows than are compared
  EXPECT_EQ(wide.count(), ComparedElements::kMost);
  for (int n = 0; n < wide.count(); ++n) ASSERT_LT(wide.place(n), wide.all());
}

}  // namespace
TEST(Normalises, WhereATileHoldsWholeGroups) {
  constexpr int kMultiprocessors = 132;
  const auto answer = [&](int64_t batch, int64_t length, int64_t channels, int64_t group) {
    const Conv1d conv{DType::kBFloat16, batch, length, channels, length, channels, 5, 1, 2};
    return normalises(conv, plan_fprop(conv, kMultiprocessors), group);
  };
  for (int64_t batch : {63, 64, 256, 1024})
    for (int level = 0; level < 3; ++level) EXPECT_TRUE(answer(batch, 16 >> level, 256 << level, 32 << level));
  EXPECT_FALSE(answer(1, 16, 256, 32));     // a tile of fewer samples than it has room for
  EXPECT_FALSE(answer(64, 12, 256, 32));    // lanes beyond the last row
  EXPECT_FALSE(answer(64, 16, 192, 24));    // or channel
  EXPECT_FALSE(answer(64, 4, 2048, 256));   // a group wider than a tile
  EXPECT_FALSE(answer(64, 256, 256, 32));   // a sample longer than one
  EXPECT_FALSE(answer(64, 4, 64, 8));       // less than a pass of a warp
  EXPECT_FALSE(answer(64, 32, 1024, 128));  // more than its registers
}

TEST(PlanAlone, TilesHaveAsManySamplesAndBlocksHelp) {
  Conv1d c = convolution(16, 12, 1024, 1024, 5, 1);
  EXPECT_EQ(plan_fprop(c, 132).rows.samples, 10);  // and six
  c.alone = true;
  EXPECT_EQ(plan_fprop(c, 132).rows.samples, 8);
  Conv1d first = convolution(8, 64, 512, 6, 5, 1);
  EXPECT_EQ(plan_normalised(first, 64, 132).exchange, 0);
  first.alone = true;
  const ConvPlan plan = plan_normalised(first, 64, 132);
  EXPECT_EQ(plan.chunks, 1);
  EXPECT_EQ(plan.splits, 4);  // three of them contract nothing
  EXPECT_EQ(plan.exchange, 1);
  // Where more blocks would not divide a tile's samples, fewer are taken, so that warps still normalise.
  Conv1d wide = convolution(4, 32, 384, 1024, 1, 1);
  wide.alone = true;
  EXPECT_GT(plan_normalised(wide, 24, 132).passes, 0);
}

// Of a tile's rows, cut into the blocks' shares, as moments cross from block to block.
TEST(PlanNormalised, MomentsFindTheirPlaces) {
  int most_parts = 0;
  for (int time = 1; time <= kTileRows; ++time) {
    for (int samples = 1; samples * time <= kTileRows; ++samples) {
      for (const auto& [splits, tiles] : {std::pair{4, 1}, {4, 2}, {8, 1}}) {
        const int all = samples * time, rows = static_cast<int>(ceil_div(all, splits));
        if (tiles == 1 && rows % time == 0) continue;  // nothing crosses
        int blocks = 0, seen = 0;
        for (int begin = 0; begin < all; begin += time)
          blocks = std::max(blocks, (begin + time - 1) / rows - begin / rows + 1);
        for (int begin = 0; begin < all; begin += rows)
          seen = std::max(seen, (std::min(begin + rows, all) - 1) / time - begin / time + 1);
        EXPECT_LE(blocks, most_blocks(time, rows, splits));
        const int groups = tiles == 2 ? 1 : std::min(16, kMaxMoments / samples);
        most_parts = std::max(most_parts, seen * groups * tiles * most_blocks(time, rows, splits));
      }
    }
  }
  EXPECT_LE(most_parts, kMaxParts);
  EXPECT_GT(most_parts * 2, kMaxParts);
}

TEST(PlanNormalised, ClustersHoldWholeGroupsOfWholeSamples) {
  int64_t exchanged = 0, narrower = 0;
  const std::pair<int, bool> contracted[] = {{640, false}, {64, false}, {640, true}, {64, true}};
  for (const auto& [x_channels, alone] : contracted) {
    for (int multiprocessors : {1, 20, 78, 132}) {
      for (int64_t batch : {1, 3, 8, 16, 64, 256}) {
        for (int64_t length : {1, 4, 6, 16, 24, 45, 48, 64, 128, 200}) {
          for (int64_t group : {4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 256, 512}) {
            Conv1d c = convolution(batch, length, group * 8, x_channels, 5, 1);
            c.alone = alone;
            const ConvPlan plain = plan_fprop(c, multiprocessors), plan = plan_normalised(c, group, multiprocessors);
            const bool alike = plain.tile_columns == plan.tile_columns;
            if (plan.tile_columns == 128 && alike) {
              EXPECT_EQ(plan.passes > 0 && plan.column_step == plan.tile_columns, normalises(c, plain, group));
            }
            // By a warp, whose lanes a row need not divide.
            if (plan.passes > 0 && (plan.tile_columns == 64 || plan.column_step < plan.tile_columns)) {
              ++narrower;
              EXPECT_EQ(plan.exchange, 0);
              EXPECT_EQ(plan.column_step % group, 0);
              EXPECT_LE(plan.column_step, plan.tile_columns);
              EXPECT_GE(plan.column_tiles * plan.column_step, c.y_channels);
              EXPECT_LT((plan.column_tiles - 1) * plan.column_step, c.y_channels);
              EXPECT_EQ(length * plan.rows.samples, plan.tile_rows);
              EXPECT_TRUE(plan.splits == 1 || plan.rows.count * plan.column_tiles * plan.splits <= multiprocessors);
              EXPECT_EQ(length % plan.passes, 0);
              EXPECT_LE(length / plan.passes * group, 128);
              EXPECT_EQ(plan.rows.samples % plan.splits, 0);
              EXPECT_LE(plan.splits, plan.together ? plan.chunks : plan.chunks * c.taps);
              continue;
            }
            if (plan.exchange == 0) {
              if (alike) {
                EXPECT_EQ(plan.splits, plain.splits);
              }
              EXPECT_EQ(plan.column_step, plan.tile_columns);
              continue;
            }
            ++exchanged;
            if (alike) {
              EXPECT_FALSE(normalises(c, plain, group));  // a warp's own group needs no exchange
            }
            EXPECT_LE(length, kTileRows);
            EXPECT_EQ(plan.tile_rows, plan.rows.samples * length);
            EXPECT_EQ(group * (plan.exchange > 1 ? 1 : plan.column_step / group), plan.column_step * plan.exchange);
            EXPECT_LE(plan.column_step, plan.tile_columns);
            EXPECT_EQ(plan.column_tiles % plan.exchange, 0);
            EXPECT_GE(plan.column_tiles * plan.column_step, c.y_channels);
            EXPECT_LT((plan.column_tiles - 1) * plan.column_step, c.y_channels);
            EXPECT_LE(plan.rows.samples * std::max<int64_t>(1, plan.column_step / group), kMaxMoments);
            EXPECT_LE(plan.cluster(), kMaxSplits);
            const int boxes = plan.together ? plan.chunks : plan.chunks * c.taps;
            EXPECT_LE(plan.splits, alone ? std::max(boxes, 4) : boxes);  // alone, some contract nothing
            const int64_t blocks = plan.rows.count * plan.column_tiles * plan.splits;
            EXPECT_GE(plan.splits, 4);  // at most four rows a warp
            EXPECT_LE(blocks * 5, multiprocessors * 4);
          }
        }
      }
    }
  }
  EXPECT_GT(exchanged, 100);
  EXPECT_GT(narrower, 100);
  const auto exchange = [](int64_t batch, int64_t length, int64_t channels) {
    return plan_normalised(convolution(batch, length, channels, channels, 5, 1), channels / 8, 132).exchange;
  };
  for (int level = 0; level < 3; ++level) {  // the networks' own
    EXPECT_EQ(exchange(8, 64 >> level, 512 << level), level == 2 ? 2 : 1);
    EXPECT_EQ(exchange(16, 48 >> level, 256 << level), 1);
  }
  EXPECT_EQ(exchange(16, 4, 2048), 2);
  EXPECT_EQ(exchange(64, 64, 512), 0);  // tiles enough without split-K
  EXPECT_EQ(exchange(28, 4, 384), 0);   // four tiles of 96 columns instead of three
  EXPECT_EQ(exchange(8, 200, 512), 0);  // a sample longer than a tile
  EXPECT_EQ(plan_normalised(convolution(3, 24, 192, 640, 5, 1), 24, 132).column_step, 96);
}

// Of two tensors side by side each has its own chunks, whether or not the first one fills its last.
TEST(ConvPlan, TwoInputsHaveChunksOfTheirOwn) {
  for (const auto& [dtype, halves] :
       {std::pair{DType::kBFloat16, false}, {DType::kFloat32, false}, {DType::kFloat32, true}})
    for (const int64_t first : {8, 64, 96, 480, 512})
      for (const int64_t second : {8, 64, 480}) {
        Conv1d c = convolution(8, 16, 256, first + second, 5, 1);
        c.dtype = dtype, c.halves = halves;
        EXPECT_EQ(plan_fprop(c, 132).first_chunks, plan_fprop(c, 132).chunks) << "one tensor";
        c.first_channels = first;
        const ConvPlan plan = plan_fprop(c, 132);
        EXPECT_EQ(plan.first_chunks, ceil_div(first, chunk(c)));
        EXPECT_EQ(plan.chunks - plan.first_chunks, ceil_div(second, chunk(c)));
      }
}

}  // namespace dpa::kernels::conv1d
