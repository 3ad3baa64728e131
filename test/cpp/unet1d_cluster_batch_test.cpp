// How the clustered kernel for batches divides a network: every input is received once for each tile, every output is finished
// once, no block makes a word unwritten again before it can know that all readers have read it, and none sends sums to
// a block that may not have read its last ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/plans/unet1d/cluster_batch_layout.h"

namespace dpa::kernels::unet1d::cluster_batch {
namespace {

constexpr int kBlocks = kClusters * kClusterBlocks;

struct Sizes {
  Config config;
  int batch, horizon;
};
const Sizes kSizes[] = {
    {{2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 2, 16},
    {{2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 3, 16},
    {{2, 3, {256, 512, 1024}, 5, 8, 256, 0, true}, 8, 16},
    {{2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 64, 16},
    {{22, 3, {256, 512, 1024}, 3, 8, 64, 7, false}, 16, 8},
    {{2, 2, {256, 512}, 5, 8, 256, 132, true}, 5, 16},
    {{2, 2, {256, 512}, 3, 8, 32, 8, true}, 16, 16},
    {{2, 1, {256}, 7, 8, 256, 132, true}, 4, 16},
    {{6, 3, {512, 1024, 2048}, 5, 8, 128, 268, true}, 1, 64},
    {{2, 3, {512, 1024, 2048}, 3, 8, 128, 0, false}, 1, 36},
    {{2, 2, {512, 1024}, 5, 8, 256, 132, true}, 1, 62},
    {{24, 3, {512, 1024, 2048}, 5, 8, 128, 256, true}, 16, 16},
    {{2, 3, {512, 1024, 2048}, 5, 8, 128, 132, true}, 8, 16},
    {{2, 3, {512, 1024, 2048}, 7, 8, 128, 132, true}, 3, 16},
    {{6, 3, {512, 1024, 2048}, 5, 8, 128, 268, true}, 8, 64},
    {{6, 3, {512, 1024, 2048}, 3, 8, 128, 268, true}, 2, 48},
    {{2, 3, {512, 1024, 2048}, 5, 8, 128, 132, true}, 4, 64},
    {{2, 3, {512, 1024, 2048}, 3, 8, 128, 132, true}, 16, 8},
    {{16, 3, {256, 512, 1024}, 5, 8, 256, 206, true}, 16, 48},
    {{16, 3, {256, 512, 1024}, 5, 8, 256, 206, true}, 2, 64},
    {{2, 3, {256, 512, 1024}, 7, 8, 256, 132, true}, 16, 16},
    {{2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 16, 32},
    {{2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 6, 12},
    {{2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 5, 24},
    {{2, 2, {1024, 2048}, 5, 8, 256, 132, true}, 16, 16},
    {{2, 3, {512, 512, 1024}, 5, 8, 256, 132, true}, 4, 32},
};

class EveryBatchLayout : public testing::TestWithParam<Sizes> {
 protected:
  Plan plan = make_plan(GetParam().config, DType::kBFloat16);
  ClusterLayout y = layout(plan, GetParam().batch, GetParam().horizon);
  void SetUp() override { ASSERT_TRUE(y.fits); }

  ClusterTile place(int layer, int block) const {
    return ClusterTile(y.layers[layer], block / kClusterBlocks, block % kClusterBlocks);
  }
  int64_t message_bytes(const ClusterLayer& l) const {
    return (static_cast<int64_t>(l.channels) << (l.times_out_log2 + y.chunk_log2)) * 2;  // zeros behind a signal too
  }
  // The words of 16 bytes, of all messages, that a block receives for a GEMM: as the kernel walks them.
  std::vector<int64_t> received(int layer, int block) const {
    const ClusterLayer& l = y.layers[layer];
    const ClusterTile p = place(layer, block);
    std::vector<int64_t> words;
    for (int n = 0; n < l.passes; ++n) {
      const ClusterPass pass(l, p, n);
      for (int octet = 0; octet < l.octets; ++octet) {
        for (int t = 0; t < 1 << l.times_in_log2; ++t) {
          for (int s = 0; s < 1 << l.samples_log2; ++s) {
            const bool second = octet >= l.first_octets;
            const int64_t at = pass.octet + octet - second * l.first_octets;
            const int64_t source = l.source[second ? 1 : pass.source];
            words.push_back(source / 16 + (((at << l.times_in_log2) + t) << y.chunk_log2) + p.sample0 + s);
          }
        }
      }
    }
    return words;
  }
  // The block that writes a word, of every layer's message.
  std::vector<std::map<int64_t, int>> writers() const {
    std::vector<std::map<int64_t, int>> of(y.count + 1);
    for (int j = 0; j < y.count; ++j)
      for (int block = 0; block < kBlocks; ++block)
        for (const int64_t quarter : written(j, block)) of[j][quarter / 4] = block;
    return of;
  }
  // The layers and blocks from which a block receives a GEMM's input: (layer, writer).
  using Sources = std::set<std::pair<int, int>>;
  std::vector<std::vector<Sources>> sources() const {
    std::vector<int> layer, writer;  // of a word
    const auto of = writers();
    for (int j = 0; j < y.count; ++j) {
      const size_t end = (y.layers[j].message + message_bytes(y.layers[j])) / 16;
      if (layer.size() < end) layer.resize(end, -1), writer.resize(end, -1);
      for (const auto& [word, block] : of[j]) layer[word] = j, writer[word] = block;
    }
    std::vector<std::vector<Sources>> from(y.count + 1, std::vector<Sources>(kBlocks));
    for (int i = 1; i <= y.count; ++i)
      for (int block = 0; block < kBlocks; ++block)
        for (const int64_t word : received(i, block)) from[i][block].insert({layer.at(word), writer.at(word)});
    return from;
  }
  // Where a cluster's blocks exchange moments, each knows what any of them knew.
  void share_moments(int layer, std::vector<std::vector<int>>& known) const {
    if (y.layers[layer].exchange_log2 == 0 || y.layers[layer].norm < 0) return;
    for (int cluster = 0; cluster < kClusters; ++cluster) {
      const auto first = known.begin() + cluster * kClusterBlocks;
      std::vector<int> all = *first;
      for (auto each = first; each != first + kClusterBlocks; ++each)
        for (int b = 0; b < kBlocks; ++b) all[b] = std::max(all[b], (*each)[b]);
      std::fill(first, first + kClusterBlocks, all);
    }
  }
  // The quarters of such words that a block writes.
  std::vector<int64_t> written(int layer, int block) const {
    const ClusterLayer& l = y.layers[layer];
    const ClusterTile p = place(layer, block);
    std::vector<int64_t> quarters;
    for (int thread = 0; thread < kGroupThreads; ++thread) {
      const OutputWord word(l, p, thread, y.chunk_log2);
      for (int r = 0; word.valid && r < 1 << l.rounds_log2; ++r)
        for (const int64_t at : {word.at, word.next}) quarters.push_back((l.message + at + r * word.next_round) / 4);
    }
    return quarters;
  }
};

TEST_P(EveryBatchLayout, FitsTwoBlocksAMultiprocessor) {
  EXPECT_LE(y.shared_bytes, kClusterSharedBytes);
  EXPECT_GE(y.stages, kMinClusterStages);
  for (int i = 1; i <= y.count; ++i) {
    const ClusterLayer& l = y.layers[i];
    EXPECT_LE(y.activations + (l.octets * l.rows + (l.pad << l.samples_log2)) * 16, y.sums) << i;
    EXPECT_LE(l.pitch * l.ways, y.sums_bytes) << i;
    EXPECT_LE(l.octets << (l.times_in_log2 + l.samples_log2), kMaxWords) << i;
  }
}

TEST_P(EveryBatchLayout, WritesEveryOutputOnce) {
  for (int i = 0; i < y.count; ++i) {
    std::set<int64_t> quarters;
    size_t count = 0;
    for (int block = 0; block < kBlocks; ++block) {
      for (const int64_t at : written(i, block)) quarters.insert(at), ++count;
    }
    EXPECT_EQ(count, quarters.size()) << "layer " << i << " writes a word twice";
    EXPECT_EQ(static_cast<int64_t>(quarters.size()) * 4, message_bytes(y.layers[i])) << i;
    EXPECT_EQ(*quarters.begin() * 4, y.layers[i].message) << i;
  }
}

TEST_P(EveryBatchLayout, TilesReceiveEveryInputOnce) {
  for (int i = 1; i <= y.count; ++i) {
    const ClusterLayer& l = y.layers[i];
    for (int cluster = 0; cluster < kClusters; ++cluster) {
      for (int tile = 0; tile < 16 / l.ways; ++tile) {
        std::set<int64_t> words;
        size_t count = 0;
        for (int rank = tile * l.ways; rank < (tile + 1) * l.ways; ++rank) {
          const auto more = received(i, cluster * kClusterBlocks + rank);
          words.insert(more.begin(), more.end()), count += more.size();
        }
        const Conv& conv = plan.convs[i - 1];
        EXPECT_EQ(count, words.size()) << i;
        const int octets = (conv.channels_in + conv.channels_skip) / 8;
        EXPECT_EQ(words.size(), static_cast<size_t>(octets) << (l.times_in_log2 + l.samples_log2)) << i;
      }
    }
  }
}

// Every value of a tile's fragments, from each of the blocks that share the tile, lies where the thread reads it that
// finishes it: as ClusterGemm::targets and ::send place them.
TEST_P(EveryBatchLayout, SumsLieWhereTheyAreFinished) {
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

TEST_P(EveryBatchLayout, TilesCoverEveryWeight) {
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
// those who wrote it had finished it, and it finishes when all who share its units have received theirs.
TEST_P(EveryBatchLayout, ResetsAWordOnlyAfterAllReadersAndBeforeTheNextPoll) {
  using Known = std::vector<int>;  // of each block, the last GEMM that it has surely received, counted on and on
  std::vector<std::vector<Known>> finished(3 * y.count + 1, std::vector<Known>(kBlocks, Known(kBlocks, -1))),
      condition_data = finished;
  const auto from = sources();
  auto join = [](Known& to, const Known& from) {
    for (int b = 0; b < kBlocks; ++b) to[b] = std::max(to[b], from[b]);
  };
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
      const ClusterTile p = place(i, block);
      for (int peer = 0; peer < p.peers; ++peer)
        join(finished[n][block], received_by[block / kClusterBlocks * kClusterBlocks + p.first_peer + peer]);
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
// that has not read the first one's.
TEST_P(EveryBatchLayout, SendsNoSumsBeforePendingAcknowledgementsArrive) {
  using Known = std::vector<int>;  // of each block, the last GEMM whose sums it has surely read, counted on and on
  const std::vector<Known> nothing(kBlocks, Known(kBlocks, -1));
  std::vector<std::vector<Known>> finished(1, nothing);  // of a GEMM: what those who have finished it know
  std::vector<Known> sent = nothing, done = nothing;     // what each block's two warpgroups know
  std::vector<uint32_t> pending_acks(kBlocks, 0);
  const auto from = sources();
  auto join = [](Known& to, const Known& from) {
    for (int b = 0; b < kBlocks; ++b) to[b] = std::max(to[b], from[b]);
  };
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
      const ClusterTile p = place(i, block);
      for (int f = 0; f < y.layers[i].finishers; ++f) {
        const int to = cluster + p.first_peer + f;
        ASSERT_GE(sent[block][to], done[to][to]) << "GEMM " << n << ", " << block << " to " << to;
      }
    }
    finished.push_back(nothing);
    for (int block = 0; block < kBlocks; ++block) {
      const ClusterTile p = place(i, block);
      if (!finishes(i, block)) continue;
      for (int peer = 0; peer < p.peers; ++peer)
        join(done[block], sent[block / kClusterBlocks * kClusterBlocks + p.first_peer + peer]);
      done[block][block] = n;
    }
    share_moments(i, done);
    for (int block = 0; block < kBlocks; ++block)
      if (finishes(i, block)) finished[i][block] = done[block];
    for (int block = 0; block < kBlocks; ++block) pending_acks[block] = AckTargets(y.layers[i], place(i, block)).by;
  }
}

// A block waits for exactly those that acknowledge to it.
TEST_P(EveryBatchLayout, AcknowledgesExactlyThoseWhoWait) {
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

INSTANTIATE_TEST_SUITE_P(Sizes, EveryBatchLayout, testing::ValuesIn(kSizes));

TEST(BatchLayout, RefusesWhatItHasNoTilesFor) {
  const Config usual = {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true};
  EXPECT_FALSE(layout(make_plan(usual, DType::kFloat32), 16, 16).fits);
  EXPECT_TRUE(layout(make_plan(usual, DType::kFloat8E4M3), 16, 16).fits);
  EXPECT_TRUE(layout(make_plan(usual, DType::kFloat16), 16, 48).fits);
  EXPECT_FALSE(layout(make_plan(usual, DType::kFloat16), 16, 128).fits);
  for (const Config& other :
       {Config{2, 2, {64, 128}}, Config{2, 2, {256, 768}}, Config{2, 2, {256, 512}, 5, 16}, Config{2, 1, {48}, 5, 4}})
    EXPECT_FALSE(layout(make_plan(other, DType::kFloat16), 16, 16).fits);
}

TEST(BatchLayout, ServesBatchesThatFillFewTiles) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3}) {
    for (const int kernel : {3, 5, 7}) {
      const Plan narrow = make_plan({2, 3, {256, 512, 1024}, kernel}, dtype),
                 wide = make_plan({2, 3, {512, 1024, 2048}, kernel}, dtype);
      for (const int horizon : {8, 12, 16, 24, 32, 48, 64}) {
        for (int batch = 1; batch < 20; ++batch) {
          const int columns = 1 << (log2_of(batch) + log2_of(horizon));
          EXPECT_EQ(serves(narrow, batch, horizon), batch > 1 && batch <= 16 && columns <= 512)
              << batch << " " << horizon;
          EXPECT_EQ(serves(wide, batch, horizon), batch > 1 && batch <= 16 && columns <= 256)
              << batch << " " << horizon;
        }
      }
    }
  }
  EXPECT_FALSE(serves(make_plan({2, 3, {256, 512, 1024}}, DType::kFloat32), 16, 16));
  EXPECT_FALSE(serves(make_plan({2, 3, {384, 768, 1536}}, DType::kFloat16), 16, 16));
}

}  // namespace
}  // namespace dpa::kernels::unet1d::cluster_batch
