// How the clustered kernel divides a network: every input is received once for each tile, every output is finished
// once, no block makes a word unwritten again before it can know that all readers have read it, and none sends sums to
// a block that may not have read its last ones.
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "test/cpp/unet1d_cluster_case.h"

namespace dpa::kernels::unet1d {
namespace {

TEST_P(EveryClusterLayout, FitsTwoBlocksAMultiprocessor) {
  EXPECT_LE(y.shared_bytes, kClusterSharedBytes);
  EXPECT_GE(y.stages, kMinClusterStages);
  for (int i = 1; i <= y.count; ++i) {
    const ClusterLayer& l = y.layers[i];
    EXPECT_LE(y.activations + (l.octets * l.rows + (l.pad << l.samples_log2)) * 16, y.sums) << i;
    EXPECT_LE(l.pitch * l.ways, y.sums_bytes) << i;
    EXPECT_LE(l.octets << (l.times_in_log2 + l.samples_log2), kMaxWords) << i;
  }
}

TEST_P(EveryClusterLayout, TakesAFormThatHasWhatItNeeds) {
  for (int i = 0; i <= y.count; ++i) {
    const ClusterLayer& l = y.layers[i];
    if (y.form == ClusterForm::kWhole) EXPECT_EQ(l.ways % kWholeWays, 0) << i << ": sums of blocks that are not there";
    if (y.form == ClusterForm::kWhole || y.form == ClusterForm::kAlone) EXPECT_EQ(l.passes, 1) << i;
    if (y.form < ClusterForm::kRounds) EXPECT_EQ(l.rounds_log2, 0) << i;
    if (y.form != ClusterForm::kGroups && l.norm >= 0)
      EXPECT_EQ(l.group_shares_log2, l.rows_log2 + l.times_log2 - 5) << i;
  }
}

TEST_P(EveryClusterLayout, WritesEveryOutputOnce) {
  for (int i = 0; i < y.count; ++i) {
    std::vector<int64_t> quarters;
    for (int block = 0; block < kBlocks; ++block)
      for (const int64_t at : written(i, block)) quarters.push_back(at);
    EXPECT_EQ(quarters.size(), count_distinct(quarters)) << "layer " << i << " writes a word twice";
    EXPECT_EQ(static_cast<int64_t>(quarters.size()) * 4, message_bytes(y.layers[i])) << i;
    EXPECT_EQ(*std::min_element(quarters.begin(), quarters.end()) * 4, y.layers[i].message) << i;
  }
}

// Whose sums a thread adds to its own, by the kernel's rule (ClusterEpilogue::moments): those of its group and sample.
TEST_P(EveryClusterLayout, MomentsAreOfOneGroup) {
  constexpr int kSlots = kGroupThreads / 8;
  for (int i = 0; i <= y.count; ++i) {
    const ClusterLayer& l = y.layers[i];
    if (l.norm < 0) continue;
    const int groups = i == 0 ? plan.config.num_groups : plan.convs[i - 1].groups, width = l.channels / groups;
    std::vector<std::pair<int, int>> of(kClusterBlocks * kSlots, {-1, -1});  // a slot's sample and group
    for (int block = 0; block < kClusterBlocks; ++block) {
      if (place(i, block).finisher >= l.finishers) continue;
      for (int slot = 0; slot < kSlots; ++slot) {
        const ThreadShare s(l, place(i, block), (slot & 3) | slot >> 2 << 5);
        if (!s.valid) continue;
        of[block * kSlots + slot] = {s.sample, s.channel / width};
        EXPECT_EQ((s.channel + 15) / width, s.channel / width) << i;
      }
    }
    const bool several = l.group_shares_log2 < l.shares_log2;
    const int blocks_log2 = std::max(0, l.group_shares_log2 - l.shares_log2);
    const int slots_log2 = l.group_shares_log2 - l.rounds_log2;
    for (int a = 0; a < kClusterBlocks * kSlots; ++a) {
      if (of[a].first < 0) continue;
      for (int b = 0; b < kClusterBlocks * kSlots; ++b) {
        if (of[b].first < 0) continue;
        const int block = a / kSlots, other = b / kSlots;
        const bool added = several ? block == other && (a % kSlots ^ b % kSlots) >> slots_log2 == 0
                                   : block >> blocks_log2 == other >> blocks_log2;
        ASSERT_EQ(added, of[a] == of[b]) << "layer " << i << ", slots " << a << " and " << b;
      }
    }
    if (blocks_log2 > 0) {
      EXPECT_GT(l.exchange_log2, 0) << i;
    }
  }
}

TEST_P(EveryClusterLayout, TilesReceiveEveryInputOnce) {
  for (int i = 1; i <= y.count; ++i) {
    const ClusterLayer& l = y.layers[i];
    for (int cluster = 0; cluster < kClusters; ++cluster) {
      for (int tile = 0; tile < 16 / l.ways; ++tile) {
        std::vector<int64_t> words;
        for (int rank = tile * l.ways; rank < (tile + 1) * l.ways; ++rank) {
          const auto more = received(i, cluster * kClusterBlocks + rank);
          words.insert(words.end(), more.begin(), more.end());
        }
        const Conv& conv = plan.convs[i - 1];
        EXPECT_EQ(count_distinct(words), words.size()) << i;
        const int octets = (conv.channels_in + conv.channels_skip) / 8;
        EXPECT_EQ(words.size(), static_cast<size_t>(octets) << (l.times_in_log2 + l.samples_log2)) << i;
      }
    }
  }
}

// Every value of a tile's fragments, from each of the blocks that share the tile, lies where the thread reads it that
// finishes it: as ClusterGemm::targets and ::send place them.
TEST_P(EveryClusterLayout, SumsLieWhereTheyAreFinished) {
  for (int i = 1; i <= y.count; ++i) {
    const ClusterLayer& l = y.layers[i];
    using Value = std::tuple<int, int, int>;  // channel, sample, time
    const size_t size = l.pitch * l.ways / 2;
    for (int cluster : {0, 5}) {
      std::vector<std::vector<Value>> landed(kClusterBlocks, std::vector<Value>(size, Value(-1, -1, -1)));
      for (int rank = 0; rank < kClusterBlocks; ++rank) {
        const ClusterTile p(l, cluster, rank);
        for (int row = 0; row < kTileRows; ++row) {
          const int of_unit = row + (p.row_tile & ((1 << l.span_log2) - 1)) * kTileRows;
          for (int column = 0; column < 1 << l.columns_log2; ++column) {
            const int sample = column & ((1 << l.samples_log2) - 1), time = column >> l.samples_log2;
            int pair = 0, late = 0;
            if (l.samples_log2 == 0) {
              pair = (time % 8 / 2 << l.pair_steps_log2) + time / 8, late = time & 1;
            } else {
              const int residue = time & ((1 << l.gap_log2) - 1);
              late = time >> l.gap_log2 & 1;
              pair = (residue << l.pair_steps_log2) + (time >> (l.gap_log2 + 1));
            }
            const int unit = (sample << l.group_log2) + (of_unit >> l.rows_log2);
            const int share = ThreadShare::share(l, unit, of_unit >> 4 & ((1 << (l.rows_log2 - 4)) - 1), pair);
            const int at =
                (p.part * l.pitch + ThreadShare::place(l, share, row & 7) * 8) / 2 + (row >> 3 & 1) * 2 + late;
            const Value value = {p.row_tile * kTileRows + row, p.sample0 + sample, time};
            auto& to = landed[p.first_peer + (share >> l.shares_log2)];
            ASSERT_EQ(to.at(at), Value(-1, -1, -1)) << i;
            to[at] = value;
          }
        }
      }
      for (int rank = 0; rank < kClusterBlocks; ++rank) {
        const ClusterTile p(l, cluster, rank);
        size_t read = 0;
        for (int thread = 0; thread < kGroupThreads; ++thread) {
          const ThreadShare s(l, p, thread);
          if (p.finisher >= l.finishers || !s.valid) continue;
          for (int round = 0; round < 1 << l.rounds_log2; ++round) {
            for (int part = 0; part < l.ways; ++part) {
              for (int k = 0; k < 4; ++k, ++read) {
                const int at = (part * l.pitch + (ThreadShare::first_place(l, thread) + round) * 8) / 2 + k;
                const Value expected = {s.channel + (k >> 1) * 8, s.sample,
                                        s.time + round * s.next_round + (k & 1) * s.gap};
                ASSERT_EQ(landed[rank].at(at), expected) << i << ", rank " << rank << ", thread " << thread;
              }
            }
          }
        }
        ASSERT_EQ(read, p.finisher < l.finishers ? size : 0) << i;
      }
    }
  }
}

TEST_P(EveryClusterLayout, TilesCoverEveryWeight) {
  for (int i = 1; i <= y.count; ++i) {
    const ClusterLayer& l = y.layers[i];
    const Tiling t = tiling(plan, plan.convs[i - 1]);
    std::set<std::tuple<int, int, int>> tiles;  // segment, tile of 64 rows, first sample
    for (int block = 0; block < kBlocks; ++block) {
      const ClusterTile p = place(i, block);
      tiles.insert({p.segment, p.row_tile, p.sample0});
    }
    EXPECT_EQ(tiles.size() * l.ways, kBlocks) << i;
    EXPECT_EQ(l.channels, kTileRows << l.row_tiles_log2) << i;
    EXPECT_EQ(l.steps[0] * l.passes * l.ways, l.taps[0] * t.steps_per_tap() * kSlices) << i;
  }
}

// Follows what each block can know of the others' progress, through three steps: it has received a GEMM's input when
// those who wrote it had finished it, and it finishes when all who send sums to it have received theirs.
TEST_P(EveryClusterLayout, ResetsAWordOnlyAfterAllReadersAndBeforeTheNextPoll) {
  std::vector<std::vector<Known>> finished(3 * y.count + 1, std::vector<Known>(kBlocks, Known(kBlocks, -1))),
      condition_data = finished;
  const auto from = sources();
  // What the first convolution's outputs imply: those who finished the last GEMM for the same sample.
  std::vector<std::vector<Known>> first(3, std::vector<Known>(kBlocks, Known(kBlocks, -1)));  // of each step
  for (int n = 1; n <= 3 * y.count; ++n) {
    const int step = (n - 1) / y.count, i = n - step * y.count;
    if (i == 1 && n > 1) {
      for (int block = 0; block < kBlocks; ++block) {
        const ThreadShare mine(y.layers[0], place(0, block), 0);
        for (int other = 0; other < kBlocks; ++other) {
          const ThreadShare theirs(y.layers[y.count], place(y.count, other), 0);
          if (mine.valid && theirs.valid && mine.sample == theirs.sample)
            join(first[step][block], finished[n - 1][other]);
        }
      }
    }
    std::vector<Known> received_by(kBlocks, Known(kBlocks, -1));
    for (int block = 0; block < kBlocks; ++block) {
      for (const auto& [j, other] : from[i][block]) {
        ASSERT_TRUE(j >= 0 && j < i);
        const int when = n - i + j;  // in this step
        join(received_by[block], j == 0 ? first[step][other] : finished[when][other]);
      }
      received_by[block][block] = n;
      condition_data[n][block] = condition_data[n - 1][block];
      join(condition_data[n][block], received_by[block]);
    }
    for (int block = 0; block < kBlocks; ++block) {
      for (const int sender : senders_to(i, block)) join(finished[n][block], received_by[sender]);
    }
    share_moments(i, finished[n]);
  }
  // What GEMM j wrote in the first step is made unwritten when it is finished in the second, and is polled again
  // in the third. A block that has received the GEMM after the next two has seen its own finishing warps through.
  for (int k = 1; k <= y.count; ++k) {
    for (int reader = 0; reader < kBlocks; ++reader) {
      for (const auto& [j, owner] : from[k][reader]) {
        const auto& at_reset = j == 0 ? first[1][owner] : finished[y.count + j][owner];
        ASSERT_GE(at_reset[reader], k) << "GEMM " << k << " may still read what " << j << " wrote";
        ASSERT_GE(condition_data[2 * y.count + k - 1][reader][owner], y.count + j + 3)
            << "GEMM " << k << " may read what " << j << " wrote a step before";
      }
    }
  }
}

// Sums of two GEMMs would mix, in memory and in the barrier's count, where a block sent the second one's to a block
// that has not read the first one's. And a barrier that completes twice before a warp has looked is as it was: the block
// that is to see an acknowledgement has seen it before the next one on the same barrier.
TEST_P(EveryClusterLayout, SendsNoSumsBeforePendingAcknowledgementsArrive) {
  // Behind what the blocks have finished: the GEMM whose input their other warpgroup waits for, acknowledgements seen.
  const std::vector<Known> nothing(kBlocks, Known(2 * kBlocks, -1));
  std::map<std::tuple<int, int, bool>, int> acknowledged;  // by whom, to whom, on which barrier: the last GEMM
  std::vector<std::vector<Known>> finished(1, nothing);    // of a GEMM: what those who have finished it know
  std::vector<Known> sent = nothing, done = nothing;       // what each block's two warpgroups know
  std::vector<uint32_t> pending_acks(kBlocks, 0);
  const auto from = sources();
  auto finishes = [&](int i, int block) { return place(i, block).finisher < y.layers[i].finishers; };
  for (int n = 1; n <= 2 * y.count; ++n) {
    const int step = (n - 1) / y.count, i = n - step * y.count;
    if (i == 1) {  // the step begins with the outputs of all who have finished the last one's samples
      const auto last = finished.back();
      finished.assign(1, nothing);
      for (int block = 0; block < kBlocks; ++block) {
        if (!finishes(0, block)) continue;
        for (int other = 0; step > 0 && other < kBlocks; ++other)
          if (finishes(y.count, other) && ThreadShare(y.layers[0], place(0, block), 0).sample ==
                                              ThreadShare(y.layers[y.count], place(y.count, other), 0).sample)
            join(done[block], last[other]);
        finished[0][block] = done[block];
        join(sent[block], done[block]);  // its two warpgroups meet
      }
    }
    for (int block = 0; block < kBlocks; ++block) {
      const int cluster = block / kClusterBlocks * kClusterBlocks;
      for (const auto& [j, writer] : from[i][block]) join(sent[block], finished[j][writer]);
      for (int rank = 0; rank < kClusterBlocks; ++rank)
        if (pending_acks[block] >> rank & 1) join(sent[block], done[cluster + rank]);
      sent[block][kBlocks + block] = n;
      const ClusterTile p = place(i, block);
      for (int f = 0; f < y.layers[i].finishers; ++f) {
        const int to = cluster + p.first_peer + f;
        ASSERT_GE(sent[block][to], done[to][to]) << "GEMM " << n << ", " << block << " to " << to;
      }
    }
    finished.push_back(nothing);
    for (int block = 0; block < kBlocks; ++block) {
      if (!finishes(i, block)) continue;
      for (const int sender : senders_to(i, block)) join(done[block], sent[sender]);
      done[block][block] = n;
    }
    share_moments(i, done);
    for (int block = 0; block < kBlocks; ++block)
      if (finishes(i, block)) finished[i][block] = done[block];
    for (int block = 0; block < kBlocks; ++block) {
      if (!finishes(i, block)) continue;
      const AckTargets acks(y.layers[i], place(i, block));
      for (int rank = acks.first; rank < acks.first + acks.count; ++rank) {
        const int to = block / kClusterBlocks * kClusterBlocks + rank;
        const auto [last, first] = acknowledged.try_emplace({block, to, acks.apart(rank)}, n);
        if (!first) {
          ASSERT_GT(done[block][kBlocks + to], last->second) << "GEMM " << n << ", " << block << " to " << to;
          last->second = n;
        }
      }
    }
    for (int block = 0; block < kBlocks; ++block) pending_acks[block] = AckTargets(y.layers[i], place(i, block)).by;
  }
}

// A block waits for exactly those that acknowledge to it.
TEST_P(EveryClusterLayout, AcknowledgesExactlyThoseWhoWait) {
  for (int i = 1; i <= y.count; ++i) {
    for (int block = 0; block < kClusterBlocks; ++block) {
      for (int other = 0; other < kClusterBlocks; ++other) {
        const AckTargets acks(y.layers[i], place(i, other));
        const bool acknowledges =
            place(i, other).finisher < y.layers[i].finishers && block >= acks.first && block < acks.first + acks.count;
        EXPECT_EQ(AckTargets(y.layers[i], place(i, block)).by >> other & 1, acknowledges)
            << i << ": " << other << " to " << block;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, EveryClusterLayout, testing::ValuesIn(all_sizes()));

TEST(ClusterLayout, RefusesWhatItHasNoTilesFor) {
  EXPECT_FALSE(cluster_layout(make_plan(kNarrow, DType::kFloat32), 16, 16).fits);
  EXPECT_TRUE(cluster_layout(make_plan(kNarrow, DType::kFloat8E4M3), 16, 16).fits);
  EXPECT_TRUE(cluster_layout(make_plan(kNarrow, DType::kFloat16), 16, 48).fits);
  EXPECT_FALSE(cluster_layout(make_plan(kNarrow, DType::kFloat16), 16, 128).fits);
  for (const Config& other : {Config{2, 2, {64, 128}}, Config{2, 2, {256, 768}}, Config{2, 2, {256, 512}, 5, 32},
                              Config{2, 2, {256, 512}, 5, 24}, Config{2, 1, {48}, 5, 4}})
    EXPECT_FALSE(cluster_layout(make_plan(other, DType::kFloat16), 16, 16).fits);
}

// What a form leaves out, none of its layouts needs; a call takes the form that was compared with float64 for its sizes.
TEST(ClusterLayout, FormsAreAsGeneralAsTheyMustBe) {
  const auto form = [](const Config& config, int batch, int horizon) {
    return cluster_layout(make_plan(config, DType::kBFloat16), batch, horizon).form;
  };
  for (const int batch : {2, 4, 5, 16})
    for (const int horizon : {8, 16}) EXPECT_EQ(form(kNarrow, batch, horizon), ClusterForm::kWhole) << batch;
  for (const int horizon : {36, 48, 64}) EXPECT_EQ(form(kWide, 1, horizon), ClusterForm::kAlone) << horizon;
  for (const int batch : {2, 8}) EXPECT_EQ(form(kWide, batch, 8), ClusterForm::kPasses) << batch;
  EXPECT_EQ(form(kWide, 8, 16), ClusterForm::kPasses);
  EXPECT_EQ(form(kWide, 2, 64), ClusterForm::kPasses);
  EXPECT_EQ(form(kWide, 16, 16), ClusterForm::kRounds);
  EXPECT_EQ(form(kNarrow, 16, 12), ClusterForm::kPasses);
}

TEST(ClusterLayout, ServesBatchesThatFillFewTiles) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3}) {
    for (const int kernel : {3, 5, 7}) {
      const Plan narrow = make_plan(with_kernel(kNarrow, kernel), dtype),
                 wide = make_plan(with_kernel(kWide, kernel), dtype);
      for (const int horizon : {8, 12, 16, 24, 32, 48, 64}) {
        EXPECT_EQ(cluster_serves(wide, 1, horizon), horizon > 32 && kernel < 7) << horizon;
        for (int batch = 2; batch < 40; ++batch) {
          const int columns = 1 << (log2_of(batch) + log2_of(horizon));
          const int most = kernel < 7 && (horizon == 8 || horizon == 16) ? 32 : 16;  // in two launches
          EXPECT_EQ(cluster_serves(narrow, batch, horizon), batch <= most && (batch > 16 || columns <= 512))
              << batch << " " << horizon;
          EXPECT_EQ(cluster_serves(wide, batch, horizon), batch <= 16 && columns <= 256) << batch << " " << horizon;
        }
      }
    }
  }
  EXPECT_FALSE(cluster_serves(make_plan(kNarrow, DType::kFloat32), 16, 16));
  EXPECT_FALSE(cluster_serves(make_plan(kNarrow, DType::kFloat16), 1, 16));
  EXPECT_FALSE(cluster_serves(make_plan({2, 3, {384, 768, 1536}}, DType::kFloat16), 16, 16));
  // One sample of several groups a slice: where samples are not filled up and tiles are few.
  const auto one = [](std::vector<int> dims, int horizon) {
    Config config = {2, static_cast<int>(dims.size()), {}, 5, 16};
    std::copy(dims.begin(), dims.end(), config.down_dims);
    return cluster_serves(make_plan(config, DType::kBFloat16), 1, horizon);
  };
  EXPECT_TRUE(one({512, 1024, 2048}, 64));
  EXPECT_FALSE(one({512, 1024, 2048}, 16));
  EXPECT_FALSE(one({256, 256, 512, 512}, 64));
  EXPECT_FALSE(one({2048, 4096}, 64));
}

}  // namespace
}  // namespace dpa::kernels::unet1d
