// Layouts of the clustered kernel for its tests: what each block of a call receives and writes, and from whom.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "kernels/plans/unet1d/cluster_layout.h"

namespace dpa::kernels::unet1d {

/// How many different numbers there are.
inline size_t count_distinct(std::vector<int64_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  return std::unique(numbers.begin(), numbers.end()) - numbers.begin();
}

inline constexpr int kBlocks = kClusters * kClusterBlocks;

// Of each block, the last GEMM that it has surely received, or whose sums it has surely read, counted on and on.
using Known = std::vector<int>;
inline void join(Known& to, const Known& from) {
  for (size_t b = 0; b < to.size(); ++b) to[b] = std::max(to[b], from[b]);
}

struct Sizes {
  Config config;
  int batch, horizon;
};
inline const Config kNarrow = {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true},
                    kWide = {6, 3, {512, 1024, 2048}, 5, 8, 128, 268, true},
                    kActions = {16, 3, {256, 512, 1024}, 5, 8, 256, 206, true};
inline Config with_kernel(Config config, int size) {
  config.kernel_size = size;
  return config;
}
inline std::vector<Sizes> all_sizes() {
  const std::pair<Config, std::vector<std::pair<int, int>>> given[] = {
      {kNarrow, {{2, 16}, {3, 16}, {64, 16}, {16, 32}, {6, 12}, {5, 24}, {4, 4}}},
      {kActions, {{16, 48}, {2, 64}}},
      {with_kernel(kNarrow, 7), {{16, 16}}},
      {kWide, {{1, 64}, {8, 16}, {8, 64}, {4, 64}, {2, 8}}},
      {with_kernel(kWide, 3), {{2, 48}, {16, 8}}},
      {with_kernel(kWide, 7), {{3, 16}}},
      {{2, 3, {256, 512, 1024}, 5, 8, 256, 0, true}, {{8, 16}}},
      {{22, 3, {256, 512, 1024}, 3, 8, 64, 7, false}, {{16, 8}}},
      {{2, 2, {256, 512}, 5, 8, 256, 132, true}, {{5, 16}}},
      {{2, 2, {256, 512}, 3, 8, 32, 8, true}, {{16, 16}}},
      {{2, 1, {256}, 7, 8, 256, 132, true}, {{4, 16}}},
      {{2, 2, {256, 256}, 3, 8, 32, 8, true}, {{2, 36}, {4, 12}, {14, 8}}},
      {{2, 3, {512, 1024, 2048}, 3, 8, 128, 0, false}, {{1, 36}}},
      {{2, 2, {512, 1024}, 5, 8, 256, 132, true}, {{1, 62}}},
      {{24, 3, {512, 1024, 2048}, 5, 8, 128, 256, true}, {{16, 16}}},
      {{2, 2, {1024, 2048}, 5, 8, 256, 132, true}, {{16, 16}}},
      {{2, 3, {512, 512, 1024}, 5, 8, 256, 132, true}, {{4, 32}, {2, 16}, {8, 16}}},
      {{2, 2, {512, 512}, 7, 8, 256, 132, true}, {{4, 16}, {3, 24}}},
      {{2, 3, {256, 512, 512}, 3, 8, 256, 132, true}, {{8, 16}}},
      {{2, 3, {256, 256, 512}, 5, 8, 256, 132, true}, {{8, 16}}},
      {{2, 4, {256, 512, 1024, 2048}, 5, 8, 256, 132, true}, {{2, 8}, {8, 16}}},
      {{7, 4, {256, 256, 512, 512}, 3, 8, 64, 20, true}, {{16, 16}, {3, 40}, {1, 64}}},
      {{7, 5, {256, 256, 256, 512, 512}, 5, 8, 64, 20, true}, {{4, 32}, {16, 16}}},
      {{2, 3, {512, 1024, 1024}, 5, 8, 256, 132, true}, {{4, 16}, {16, 8}}},
      {{2, 2, {1024, 1024}, 3, 8, 256, 132, true}, {{2, 16}, {3, 24}}},
      {{2, 3, {256, 512, 1024}, 5, 16, 256, 132, true}, {{2, 16}, {6, 16}, {16, 16}, {16, 32}, {5, 24}}},
      {{2, 3, {512, 1024, 2048}, 5, 16, 128, 268, true}, {{1, 64}, {8, 64}, {8, 16}, {3, 16}}},
      {{2, 3, {512, 1024, 2048}, 3, 32, 128, 268, true}, {{1, 64}, {8, 64}, {8, 16}, {2, 48}}},
      {{2, 2, {512, 512}, 7, 32, 256, 132, true}, {{4, 16}, {3, 24}}},
      {{2, 2, {1024, 2048}, 5, 32, 256, 132, true}, {{16, 16}, {1, 40}}},
  };
  std::vector<Sizes> sizes;
  for (const auto& [config, calls] : given)
    for (const auto& [batch, horizon] : calls) sizes.push_back({config, batch, horizon});
  return sizes;
}

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
  // The layers and blocks from which a block receives a GEMM's input: (layer, writer).
  using Sources = std::set<std::pair<int, int>>;
  std::vector<std::vector<Sources>> sources() const {
    std::vector<std::pair<int, int>> from_whom;  // of a word
    for (int j = 0; j < y.count; ++j) {
      const size_t end = (y.layers[j].message + message_bytes(y.layers[j])) / 16;
      if (from_whom.size() < end) from_whom.resize(end, {-1, -1});
      for (int block = 0; block < kBlocks; ++block)
        for (const int64_t quarter : written(j, block)) from_whom.at(quarter / 4) = {j, block};
    }
    std::vector<std::vector<Sources>> from(y.count + 1, std::vector<Sources>(kBlocks));
    for (int i = 1; i <= y.count; ++i)
      for (int block = 0; block < kBlocks; ++block)
        for (std::pair<int, int> last = {-2, -2}; const int64_t word : received(i, block))
          if (from_whom.at(word) != last) from[i][block].insert(last = from_whom[word]);  // neighbours have one writer
    return from;
  }
  // Where a cluster's blocks exchange moments, each knows what any of them knew.
  void share_moments(int layer, std::vector<Known>& known) const {
    if (y.layers[layer].exchange_log2 == 0) return;
    for (int cluster = 0; cluster < kClusters; ++cluster) {
      const auto first = known.begin() + cluster * kClusterBlocks;
      Known all = *first;
      for (auto each = first; each != first + kClusterBlocks; ++each) join(all, *each);
      std::fill(first, first + kClusterBlocks, all);
    }
  }
  // The ranks to which a block sends sums: as ClusterGemm::targets and ::send place them.
  uint32_t receivers(int layer, int block) const {
    const ClusterLayer& l = y.layers[layer];
    const ClusterTile p = place(layer, block);
    uint32_t ranks = 0;
    for (int row = 0; row < kTileRows; row += 16) {
      const int of_unit = row + (p.row_tile & ((1 << l.span_log2) - 1)) * kTileRows;
      for (int sample = 0; sample < 1 << l.samples_log2; ++sample) {
        for (int pair = 0; pair < 1 << l.pairs_log2; ++pair) {
          const int unit = (sample << l.group_log2) + (of_unit >> l.rows_log2);
          const int share = ThreadShare::share(l, unit, of_unit >> 4 & ((1 << (l.rows_log2 - 4)) - 1), pair);
          ranks |= 1u << (p.first_peer + (share >> l.shares_log2));
        }
      }
    }
    return ranks;
  }
  // The blocks, itself among them, whose sums a block waits for.
  std::vector<int> senders_to(int layer, int block) const {
    std::vector<int> blocks = {block};
    const int first = block / kClusterBlocks * kClusterBlocks;
    for (int other = first; other < first + kClusterBlocks; ++other)
      if (other != block && receivers(layer, other) >> (block - first) & 1) blocks.push_back(other);
    return blocks;
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

}  // namespace dpa::kernels::unet1d
