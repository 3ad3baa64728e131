// How group_norm_act on channels-last images is cut into clusters of blocks: pure host arithmetic on sizes.
#pragma once
#include <cstdint>

namespace dpa::kernels {

struct GroupNormActShape {
  int64_t batch, channels, rows;  // (B, C, H * W)
  int64_t groups;
};

struct GroupNormActPlan {
  int width = 0;    // 16-byte vectors of a row that a block owns: a power of two, and whole groups
  int group = 0;    // vectors of a group: a power of two
  int columns = 0;  // blocks that share a row
  int cluster = 0;  // blocks that share the rows of a sample: a power of two, 1 where the device has no clusters
  int held = 0;     // rows that a thread keeps in shared memory; 0 where it reads them from memory in every pass

  bool fits() const { return width > 0; }
};

constexpr int kGroupNormActThreads = 256, kGroupNormActVectors = 4, kGroupNormActCluster = 8;
constexpr int kGroupNormActWidest = 128;  // vectors of a group whose sums fit into 48 KB
constexpr int kGroupNormActHeld = 8;      // of three images 96 KB: two blocks a multiprocessor, and few to synchronise

/// The plan for elements of `element_size` bytes that are aligned to 16; one that does not fit where rows or groups are
/// no whole vectors, or groups no power of two of them.
inline GroupNormActPlan group_norm_act_plan(const GroupNormActShape& shape, int element_size, bool clusters) {
  const int64_t vector = 16 / element_size, channels = shape.channels / shape.groups, group = channels / vector;
  if (shape.rows == 0 || channels == 0 || channels % vector != 0 || (group & (group - 1)) != 0) return {};
  if (group > kGroupNormActWidest || shape.channels * shape.rows > INT32_MAX) return {};
  const int64_t row = shape.channels / vector;
  int64_t width = group;  // from here on wider while lines of 128 bytes are not whole
  while (width < 8 && row % (width * 2) == 0) width *= 2;
  // And wider yet, up to a warp, while the threads still have all rows at once: small maps make fewer, fuller blocks.
  const auto at_once = [](int64_t wide) { return kGroupNormActThreads / wide * kGroupNormActVectors; };
  while (width < 32 && row % (width * 2) == 0 && shape.rows <= at_once(width * 2)) width *= 2;
  GroupNormActPlan plan;
  plan.width = static_cast<int>(width), plan.group = static_cast<int>(group);
  plan.columns = static_cast<int>(row / width);
  plan.cluster = 1;
  const int64_t slots = kGroupNormActThreads / width;
  while (clusters && plan.cluster < kGroupNormActCluster && shape.rows > plan.cluster * slots * kGroupNormActHeld)
    plan.cluster *= 2;
  const int64_t held = (shape.rows + plan.cluster * slots - 1) / (plan.cluster * slots);
  if (clusters && held <= kGroupNormActHeld) plan.held = static_cast<int>(held);
  return plan;
}

}  // namespace dpa::kernels
