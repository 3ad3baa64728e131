// How the clustered kernel divides a network: every input is received once for each tile, every output is finished
// once, no block makes a word unwritten again before it can know that all readers have read it, and none sends sums to
// a block that may not have read its last ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/plans/unet1d/cluster_layout.h"

namespace dpa::kernels::unet1d {
namespace {

constexpr int kBlocks = kClusters * kClusterBlocks;

struct Sizes {
  Config config;
  int batch, horizon;
};
const Sizes kSizes[] = {
    {{2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 2, 16},  {{2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 3, 16},
    {{2, 3, {256, 512, 1024}, 5, 8, 256, 0, true}, 8, 16},    {{2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 64, 16},
    {{22, 3, {256, 512, 1024}, 3, 8, 64, 7, false}, 16, 8},   {{2, 2, {256, 512}, 5, 8, 256, 132, true}, 5, 16},
    {{2, 2, {256, 512}, 3, 8, 32, 8, true}, 16, 16},          {{2, 1, {256}, 7, 8, 256, 132, true}, 4, 16},
    {{6, 3, {512, 1024, 2048}, 5, 8, 128, 268, true}, 1, 64}, {{2, 3, {512, 1024, 2048}, 3, 8, 128, 0, false}, 1, 36},
    {{2, 2, {512, 1024}, 5, 8, 256, 132, true}, 1, 62},
};

class EveryClusterLayout : public testing::TestWithParam<Sizes> {
 protected:
  Plan plan = make_plan(GetParam().config, DType::kBFloat16);
  ClusterLayout y = cluster_layout(plan, GetParam().batch, GetParam().horizon);
  void SetUp() override { ASSERT_TRUE(y.fits); }

  ClusterTile place(int layer, int block) const {
    return ClusterTile(y.layers[layer], block / kClusterBlocks, block % kClusterBlocks);
  }
  int64_t message_bytes(const ClusterLayer& l) const {
    return (static_cast<int64_t>(l.channels) << (l.times_out_log2 + y.chunk_log2)) * 2;  // zeros behind a signal too
  }
  // The words of 16 bytes, of all messages, that a block receives for a GEMM: as the kernel walks them.
  std::set<int64_t> received(int layer, int block) const {
    const ClusterLayer& l = y.layers[layer];
    const ClusterTile p = place(layer, block);
    std::set<int64_t> words;
    for (int octet = 0; octet < l.octets; ++octet) {
      for (int t = 0; t < 1 << l.times_in_log2; ++t) {
        for (int s = 0; s < 1 << l.samples_log2; ++s) {
          const bool second = octet >= l.first_octets;
          const int64_t at = p.slice * l.slice_octets + p.half * l.half_octets + octet - second * l.first_octets;
          const int64_t source = l.source[p.half || second];
          words.insert(source / 16 + (((at << l.times_in_log2) + t) << y.chunk_log2) + p.sample0 + s);
        }
      }
    }
    return words;
  }
  // Where a cluster's blocks exchange moments, each knows what any of them knew.
  void share_moments(int layer, std::vector<std::vector<int>>& known) const {
    if (!y.alone || y.layers[layer].norm < 0) return;
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
      if (word.valid) quarters.push_back((l.message + word.at) / 4), quarters.push_back((l.message + word.next) / 4);
    }
    return quarters;
  }
};

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

TEST_P(EveryClusterLayout, WritesEveryOutputOnce) {
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

TEST_P(EveryClusterLayout, TilesReceiveEveryInputOnce) {
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
    EXPECT_EQ(l.steps[0] * l.ways, l.taps[0] * t.steps_per_tap() * kSlices) << i;
  }
}

// Follows what each block can know of the others' progress, through three steps: it has received a GEMM's input when
// those who wrote it had finished it, and it finishes when all who share its units have received theirs.
TEST_P(EveryClusterLayout, ResetsAWordOnlyAfterAllReadersAndBeforeTheNextPoll) {
  using Known = std::vector<int>;  // of each block, the last GEMM that it has surely received, counted on and on
  std::vector<std::vector<Known>> finished(3 * y.count + 1, std::vector<Known>(kBlocks, Known(kBlocks, -1))),
      condition_data = finished;
  std::vector<std::vector<std::set<int64_t>>> reads(y.count + 1);
  std::vector<std::map<int64_t, int>> writer(y.count + 1);  // of a word
  for (int i = 0; i <= y.count; ++i) {
    for (int block = 0; block < kBlocks; ++block) {
      reads[i].push_back(i ? received(i, block) : std::set<int64_t>());
      if (i < y.count)
        for (const int64_t quarter : written(i, block)) writer[i][quarter / 4] = block;
    }
  }
  std::map<int64_t, std::vector<std::pair<int, int>>> readers;  // of a word: GEMM, block
  for (int k = 1; k <= y.count; ++k) {
    for (int block = 0; block < kBlocks; ++block)
      for (const int64_t word : reads[k][block]) readers[word].push_back({k, block});
  }
  auto layer_of = [&](int64_t word) {
    for (int j = 0; j < y.count; ++j) {
      const int64_t begin = y.layers[j].message / 16;
      if (word >= begin && word < begin + message_bytes(y.layers[j]) / 16) return j;
    }
    return -1;
  };
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
      std::set<std::pair<int, int>> from;
      for (const int64_t word : reads[i][block]) {
        const int j = layer_of(word);
        ASSERT_GE(j, 0);
        from.insert({j, writer[j].at(word)});
      }
      for (const auto& [j, other] : from) {
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
  for (int j = 0; j < y.count; ++j) {
    for (const auto& [word, owner] : writer[j]) {
      for (const auto& [k, reader] : readers.at(word)) {
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
TEST_P(EveryClusterLayout, SendsNoSumsBeforePendingAcknowledgementsArrive) {
  using Known = std::vector<int>;  // of each block, the last GEMM whose sums it has surely read, counted on and on
  const std::vector<Known> nothing(kBlocks, Known(kBlocks, -1));
  std::vector<std::vector<Known>> finished(1, nothing);  // of a GEMM: what those who have finished it know
  std::vector<Known> sent = nothing, done = nothing;     // what each block's two warpgroups know
  std::vector<uint32_t> pending_acks(kBlocks, 0);
  std::vector<std::map<int64_t, std::set<int>>> writers(y.count + 1);
  for (int j = 0; j < y.count; ++j)
    for (int block = 0; block < kBlocks; ++block)
      for (const int64_t quarter : written(j, block)) writers[j][quarter / 4].insert(block);
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
      std::set<std::pair<int, int>> from;
      for (const int64_t word : received(i, block))
        for (int j = 0; j < i; ++j)
          if (const auto found = writers[j].find(word); found != writers[j].end())
            for (const int writer : found->second) from.insert({j, writer});
      for (const auto& [j, writer] : from) join(sent[block], finished[j][writer]);
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

INSTANTIATE_TEST_SUITE_P(Sizes, EveryClusterLayout, testing::ValuesIn(kSizes));

TEST(ClusterLayout, RefusesWhatItHasNoTilesFor) {
  const Config usual = {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true};
  EXPECT_FALSE(cluster_layout(make_plan(usual, DType::kFloat32), 16, 16).fits);
  EXPECT_TRUE(cluster_layout(make_plan(usual, DType::kFloat8E4M3), 16, 16).fits);
  EXPECT_FALSE(cluster_layout(make_plan(usual, DType::kFloat16), 16, 48).fits);
  for (const Config& other : {Config{2, 3, {512, 1024, 2048}, 5, 8, 256, 132, true}, Config{2, 2, {128, 256}},
                              Config{2, 2, {256, 768}}, Config{2, 2, {256, 512}, 5, 16}, Config{2, 1, {48}, 5, 4}})
    EXPECT_FALSE(cluster_layout(make_plan(other, DType::kFloat16), 16, 16).fits);
}

TEST(ClusterLayout, ServesSeveralSamplesOfNetworksItWasComparedOn) {
  const Config usual = {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true};
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const Plan plan = make_plan(usual, dtype);
    for (const int batch : {2, 5, 16, 17, 1000}) EXPECT_TRUE(cluster_serves(plan, batch, 16)) << batch;
    for (const int batch : {0, 1}) EXPECT_FALSE(cluster_serves(plan, batch, 16)) << batch;
    EXPECT_TRUE(cluster_serves(plan, 16, 8));
    for (const int horizon : {4, 32, 48}) EXPECT_FALSE(cluster_serves(plan, 16, horizon)) << horizon;
    const Plan wide = make_plan({2, 3, {512, 1024, 2048}}, dtype);
    for (const int horizon : {36, 48, 64}) EXPECT_TRUE(cluster_serves(wide, 1, horizon)) << horizon;
    for (const int horizon : {16, 32, 68}) EXPECT_FALSE(cluster_serves(wide, 1, horizon)) << horizon;
    EXPECT_FALSE(cluster_serves(wide, 2, 64));
  }
  EXPECT_FALSE(cluster_serves(make_plan(usual, DType::kFloat32), 16, 16));
  EXPECT_TRUE(cluster_serves(make_plan({2, 2, {256, 512}, 3}, DType::kFloat16), 16, 8));
  EXPECT_FALSE(cluster_serves(make_plan({2, 2, {256, 512}, 7}, DType::kFloat16), 16, 16));
  EXPECT_FALSE(cluster_serves(make_plan({2, 2, {512, 1024}, 5}, DType::kFloat16), 16, 16));
}

}  // namespace
}  // namespace dpa::kernels::unet1d
