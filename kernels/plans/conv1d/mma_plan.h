// Which tiles a convolution by warp-level MMAs (`mma.sync`, compute capability 8.0 and later) is cut into: pure
// functions of sizes and of the number of multiprocessors.
#pragma once
#include "kernels/plans/conv1d/plan.h"

namespace dpa::kernels::conv1d {

constexpr int kMmaThreads = 256;       // of a block: eight warps
constexpr int kMaxBoxRows = 160;       // of A in a stage
constexpr int kMmaMemory = 99 * 1024;  // shared memory that a block has on every such device
constexpr int kWgradYChannels = 128;   // of a tile of the weight gradient
constexpr int kMaxMmaSplits = 16;

// fprop or dgrad. `conv` has the tile's rows and columns: 128 or 64 each.
struct MmaPlan {
  ConvPlan conv;
  int box_times;              // of x that a tile reads, at most
  int box_bytes, weights_at;  // of a stage of A; where the weights' stages begin
  int boxes;                  // stages of A: a box is loaded while the terms of those before are multiplied
  int splits, split_chunks;   // blocks a tile, and chunks of channels that each contracts, of all rounds
  bool fits() const { return boxes > 0; }
  int64_t tiles() const { return conv.rows.count * conv.phases * conv.column_tiles; }
  // Of the sums of all blocks, where several have a tile: float32, until one adds them.
  int64_t partials_bytes() const { return splits > 1 ? tiles() * splits * conv.tile_rows * conv.tile_columns * 4 : 0; }
};
// `group`: channels that a normalisation in the epilogue needs in one tile, or 0.
MmaPlan plan_mma_fprop(const Conv1d& conv, int multiprocessors, int64_t group = 0);
MmaPlan plan_mma_dgrad(const Conv1d& conv, int multiprocessors);

// Stages of the weights, by the size of the tile.
constexpr int mma_stages(int rows, int columns) {
  return rows * columns == 128 * 128 ? 3 : rows * columns == 64 * 64 ? 6 : 4;
}
int mma_bytes(const MmaPlan& plan);  // shared memory of a block

// The weight gradient: a tile is kWgradYChannels channels i by all taps of `x_channels` channels j. A step contracts
// `step_rows` rows (b, t), in the order of memory, whatever the samples' length.
struct MmaWgradPlan {
  int step_rows, box_rows;           // of y and of x in a stage
  int step_times, step_x;            // from step to step: times beyond whole samples, and rows of x, within a sample
  int slots;                         // sixteen columns each of a warp, a tap each
  int x_channels, x_pitch, x_shift;  // of a tile; bytes of its rows in a stage, and log2 of 16 bytes of them
  int64_t steps, y_tiles, x_tiles;
  int splits;  // blocks a tile; from two on each stores its sums in a workspace
  bool fits() const { return slots > 0; }
};
MmaWgradPlan plan_mma_wgrad(const Conv1d& conv, int multiprocessors);
// Stages, and rows (b, t) of each: as many as fit twice into a multiprocessor's shared memory.
constexpr bool has_long_steps(int slots) { return slots == 5 || slots > 6; }
constexpr int wgrad_stages(int slots) { return has_long_steps(slots) ? 3 : 4; }
constexpr int wgrad_rows(int slots, int size) { return (has_long_steps(slots) ? 128 : 64) / size; }
// Of a row of y or x in a stage: padded, so that the rows that an instruction reads begin in different banks.
constexpr int wgrad_pitch(int channels, int size) { return channels * size + (size == 2 ? 16 : 32); }
int mma_wgrad_bytes(const Conv1d& conv, const MmaWgradPlan& plan);

// Whether warp-level MMAs serve all three of a convolution's GEMMs.
bool mma_serves(const Conv1d& conv);

}  // namespace dpa::kernels::conv1d
