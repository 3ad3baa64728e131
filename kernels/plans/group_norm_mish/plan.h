// How group_norm_mish on channels-last activations is cut into teams of threads: pure host arithmetic on sizes.
#pragma once
#include <algorithm>
#include <cstdint>

namespace dpa::kernels {

struct NormShape {
  int64_t batch, channels, inner;  // (B, C, L)
  int64_t groups;
};

/// A team owns one group of one sample: `inner` rows of C / G neighbouring channels, read as vectors of 16 bytes, or of a
/// half, a quarter and so on where a row is no whole number of those, down to one channel. A thread holds 1, 2 or 4
/// whole ones, 4 or 8 smaller ones, or 4 or 16 of one channel. Larger groups are divided among the teams of a cluster
/// of blocks, which read them once for the statistics and once more for what they write.
struct NormPlan {
  int owned = 0;     // channels of a vector
  int width = 0;     // threads along a row, a power of two; those beyond the row's vectors stay idle
  int threads = 0;   // of a team: a power of two; one warp or less, or the whole block
  int vectors = 0;   // that a thread holds, one a pass over threads / width rows
  int block = 0;     // threads of a block
  int groups = 0;    // neighbouring groups a block works on, so that a warp reads whole sectors of narrow groups
  int channels = 0;  // of a group
  int ranks = 0;     // blocks that share a group, a power of two; 0: a team holds it in registers

  bool fits() const { return threads > 0; }
  /// Samples a block works on at a time.
#ifdef __CUDACC__
  __host__ __device__
#endif
      int
      samples() const {
    return block / threads / groups;
  }
  /// Of a block's sums over its rows: what each warp, or part of one that is a team, has of each vector of a row.
  int sum_places() const {
    const int within = threads < 32 ? threads : 32, stride = within > width ? within : width;
    return samples() * (threads / stride) * groups * width;
  }
};

constexpr int kWarpThreads = 32, kNormBlock = 128, kMaxTeam = 256, kMaxVectors = 4, kMaxSmallVectors = 8,
              kMaxSingleChannels = 16, kMaxRanks = 8;
/// Blocks of kNormBlock threads that an H100 holds at once with 128 registers a thread: 4 on each of 132
/// multiprocessors.
constexpr int64_t kResidentBlocks = 528;
constexpr int64_t kMaxSlices = 65535;  // the grid's limit

inline int64_t power_of_two_from(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

/// Blocks of a group that a team's registers do not hold, where the device has clusters: until each has its rows at
/// once, or the device is full.
inline int ranks_of(const NormShape& shape, int64_t rows_at_once) {
  int ranks = 1;
  const auto more = [&] {
    return ranks * rows_at_once < shape.inner && 2 * shape.batch * shape.groups * ranks < kResidentBlocks;
  };
  while (ranks < kMaxRanks && more()) ranks *= 2;
  return ranks;
}

/// The teams for channels-last tensors of elements of `element_size` bytes that are aligned to 16; a plan that does not
/// fit where rows are not aligned, or wider than a block of threads. `clusters`: whether the device has them.
inline NormPlan teams(const NormShape& shape, int element_size, bool clusters) {
  const int64_t whole = 16 / element_size, row = shape.channels / shape.groups;
  if (row == 0 || shape.inner == 0) return {};
  if (shape.channels % whole != 0 || shape.channels * shape.inner > INT32_MAX)
    return {};  // offsets in a sample are ints
  int64_t vector = whole;
  while (row % vector != 0) vector /= 2;
  const int64_t most = vector == whole ? kMaxVectors : vector > 1 ? kMaxSmallVectors : kMaxSingleChannels;
  const int64_t width = power_of_two_from(row / vector), passes = shape.inner;
  int64_t threads = power_of_two_from(width * passes);
  if (threads > kWarpThreads) threads = width > kWarpThreads ? width : kWarpThreads;
  const auto held = [&] {
    const int64_t at_once = std::max<int64_t>(threads / width, 1);  // rows
    return (passes + at_once - 1) / at_once;
  };
  while (held() > kMaxVectors && threads < kMaxTeam) threads *= 2;
  if (width > kMaxTeam) return {};
  NormPlan plan;
  if (held() > most) {
    threads = kMaxTeam;
    plan.ranks = clusters ? ranks_of(shape, kMaxVectors * (threads / width)) : 1;
  }
  plan.owned = static_cast<int>(vector);
  plan.width = static_cast<int>(width);
  plan.threads = static_cast<int>(threads);
  plan.vectors = plan.ranks > 0 ? kMaxVectors : static_cast<int>(power_of_two_from(held()));
  if (vector < whole && plan.ranks == 0)
    plan.vectors = static_cast<int>(plan.vectors <= kMaxVectors ? kMaxVectors : most);  // few forms
  plan.block = threads > kWarpThreads ? plan.threads : kNormBlock;
  plan.channels = static_cast<int>(row);
  plan.groups = 1;
  while (plan.groups * 2 * threads <= kWarpThreads && shape.groups % (plan.groups * 2) == 0) plan.groups *= 2;
  return plan;
}

/// Slices of the samples, or of rows where blocks share a group: those of a block. Gradients of weight and bias are added
/// up slice by slice. The number depends on sizes and on whether there are clusters alone: results repeat bit for bit.
inline int64_t slices(const NormShape& shape, const NormPlan& plan) {
  if (!plan.fits()) return shape.batch;
  const int64_t useful = (shape.batch + plan.samples() - 1) / plan.samples();
  const int64_t ranks = plan.ranks > 0 ? plan.ranks : 1;
  const int64_t resident = kResidentBlocks * kNormBlock / plan.block / (shape.groups / plan.groups) / ranks;
  return ranks * std::min(useful, std::max<int64_t>(resident, 1));
}

}  // namespace dpa::kernels
