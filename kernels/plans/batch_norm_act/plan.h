// How batch_norm_act on channels-last images is cut into blocks: pure host arithmetic on sizes.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/math/host_device.h"

namespace dpa::kernels {

struct BatchNormActShape {
  int64_t channels, rows;  // (C, B * H * W)
};

struct BatchNormActDevice {
  int multiprocessors = 1;
  bool clusters = false;  // whether the code that runs there knows them
};

struct BatchNormActPlan {
  int width = 0;    // 16-byte vectors of a row that a block owns: a power of two
  int columns = 0;  // blocks that share a row
  int cluster = 0;  // blocks that add up their sums before they leave them: a power of two, 1 without clusters
  int slices = 0;   // sums that are left for a column, each of a cluster's rows

  bool fits() const { return width > 0; }
  /// Blocks of a column.
  DPA_HOST_DEVICE int blocks() const { return cluster * slices; }
};

constexpr int kBatchNormActThreads = 512, kBatchNormActBlocks = 2;  // blocks of a multiprocessor
constexpr int kBatchNormActWidest = 8;                              // lines of 128 bytes
constexpr int kBatchNormActCluster = 4;  // of 8, one less than the blocks of a Hopper GPU make fits at once
constexpr int kBatchNormActSlices = 64;  // every block reads the sums of all

/// The plan for elements of `element_size` bytes that are aligned to 16; one that does not fit where rows are no whole
/// vectors.
inline BatchNormActPlan batch_norm_act_plan(const BatchNormActShape& shape, int element_size,
                                            const BatchNormActDevice& device) {
  const int64_t vector = 16 / element_size, row = shape.channels / vector;
  if (shape.rows == 0 || row == 0 || shape.channels % vector != 0 || shape.rows > INT32_MAX / 2) return {};
  BatchNormActPlan plan;
  plan.width = 1;
  while (plan.width < kBatchNormActWidest && row % (plan.width * 2) == 0) plan.width *= 2;
  plan.columns = static_cast<int>(row / plan.width);
  const int64_t slots = kBatchNormActThreads / plan.width;
  const int64_t share = int64_t{kBatchNormActBlocks} * device.multiprocessors / plan.columns;
  const int64_t blocks = std::clamp<int64_t>((shape.rows + slots - 1) / slots, 1, std::max<int64_t>(share, 1));
  plan.cluster = 1;
  while (device.clusters && plan.cluster < kBatchNormActCluster && blocks >= plan.cluster * 2) plan.cluster *= 2;
  plan.slices = static_cast<int>(std::min<int64_t>(blocks / plan.cluster, kBatchNormActSlices));
  return plan;
}

/// How many rows the clusters of slice `slice` own, of `slots` rows a block at a time.
DPA_HOST_DEVICE int64_t batch_norm_act_count(const BatchNormActPlan& plan, int64_t rows, int slots, int slice) {
  const int64_t cluster = int64_t{plan.cluster} * slots, all = cluster * plan.slices;
  const int64_t rest = rows % all - slice * cluster;
  return rows / all * cluster + (rest < 0 ? 0 : rest < cluster ? rest : cluster);
}

}  // namespace dpa::kernels
