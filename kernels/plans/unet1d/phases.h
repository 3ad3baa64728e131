// The network as phases of one persistent kernel: the plan of the loop in phases. A phase is a GEMM with what its consumer
// does folded into the load of its input, so that a convolution costs one hand-over:
//   input   value = sum over partials of the previous phase's output;  norm: mish(group_norm(value)), then FiLM;
//           value += residual;  the joined skip connection beside it
//   output  partial sums of slice k of the input channels, to be added by whoever reads them
// A phase's tiles are slices_out x slices_in x slices_batch. A slice of the input channels is whole GroupNorm groups and
// a slice of the batch whole samples, so that the block of a tile normalises its own input and no statistics travel.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/plans/unet1d/plan.h"

namespace dpa::kernels::unet1d {

constexpr int kPhaseWarps = 8;
constexpr int kPhaseStatistics = 512;  // most (sample, group) pairs of a tile
constexpr int kPhaseEntry = 672;       // bytes of a phase in a block's table
constexpr int kMaxPhases = kMaxConvs + 2;
constexpr int kPhaseColumnTiles = 8;  // most column tiles (of 8) that a warp accumulates
// Slots of a warp's buffer of weights where tiles need the room: the next pair of tiles comes while one is multiplied, or
// the next two.
constexpr int kPhaseLeastSlots = 2, kPhaseFewSlots = 3;

enum class PhaseKind : int { kConv, kTail, kSampler };
/// kPartials: partial sums of a phase.  kFinished: floats that a phase keeps.  kHead: of the sample, computed on load.
enum class SourceKind : int { kNone, kPartials, kFinished, kHead };

/// Where the values of an input come from. Words are 4 bytes; offsets into the workspace.
struct PhaseSource {
  SourceKind kind = SourceKind::kNone;
  int words = 0;     // of the first partial sum
  int partials = 1;  // 1, 2, 4 or 8
  int partial_stride = 0, column_stride = 0;
};

struct PhaseSegment {
  int64_t weights = 0;  // byte offset of the packed tiles
  int taps = 0, first = 0;
  int out = 0;                          // words
  int time_stride = 1, time_first = 0;  // output time = column time * time_stride + time_first
  int bias = 0, scale = -1;             // offsets into the floats
};

/// Byte offsets into shared memory of what a tile keeps there.
struct TileShared {
  int columns = 0, parameters = 0, sample = 0, slab = 0, stash = 0, residual = 0, statistics = 0;
};
/// The same of the phases' table, behind the buffer of weights; the bytes of all.
struct PhaseShared {
  int table = 0, bytes = 0;
  bool tables_kept = false;  // whether every phase has room of its own for its columns and offsets
};

struct Phase {
  PhaseKind kind = PhaseKind::kConv;
  int slices_out = 1, slices_in = 1, slices_batch = 1, tiles = 1;
  int samples = 1;  // of a slice of the batch
  // input
  int times_in = 0, channels_in = 0;                              // channels of the value (the skip has as many)
  int units = 1, unit_channels = 0, unit_padded = 0, joined = 0;  // a unit: a slice of the packed tiles' input
  int norm = -1, group_channels = 0, film = -1;
  int counted = 0;  // of group_channels, by GroupNorm
  uint32_t group_magic = 0, counted_magic = 0;
  PhaseSource value, residual, skip;
  int keep = -1, keep_stride = 0;  // words of the finished floats
  // GEMM
  int row_tiles = 0, slice_tiles = 0, channels_out = 0;  // slice_tiles: of a slice of the packed tiles' output
  int columns = 0;                                       // of a sample
  int time_stride = 1, pad = 0;
  int warps_rows = 1, warps_columns = 1, warps_k = 1, column_tiles = 1;
  int num_segments = 0;
  PhaseSegment segments[2];
  int times_out = 0, partial_stride = 0, column_stride = 0;  // of the output, in words
  TileShared shared;
};

struct PhasePlan {
  std::vector<Phase> phases;
  PhaseShared shared;
  int ring_slots = 0;
  int sample_words = 0;                     // offset of the sample in the workspace
  int output_words = 0, output_slices = 1;  // offset of the tail's partial sums, and their number
  int workspace_words = 0;                  // zeros before a launch
  int warp_runs = 0;                        // the most runs of a warp in a step
  double clocks = 0;                        // of a step, as the model has it that chose the tilings
  std::string error;
};

/// Tiles that a warp multiplies one after another: the place of the first in units of 16 bytes; their number, and, from
/// bit 16, how many tiles lie from one to the next.
struct alignas(8) PhaseRun {
  uint32_t from, tiles;
};

/// Reads the packed tiles of `plan`. There is a block a multiprocessor, all at once.
PhasePlan make_phases(const Plan& plan, int batch, int horizon, const Device& device);
/// The same, made once for each of the sizes; for other threads too.
std::shared_ptr<const PhasePlan> phases_of(const Plan& plan, int batch, int horizon, const Device& device);
/// Bytes of the workspace of a launch: the messages, then every warp's runs.
size_t phase_workspace_bytes(const PhasePlan& plan, const Device& device);

/// Bytes in a slot of a warp's buffer of weights: two tiles.
inline int phase_slot_bytes(DType dtype) { return 2 * 256 * element_bytes(dtype); }
/// x / divisor = mulhi(x, magic) for x * divisor < 2^32, divisor > 1.
inline uint32_t magic_of(int divisor) {
  return divisor > 1 ? static_cast<uint32_t>(((uint64_t{1} << 32) + divisor - 1) / divisor) : 0;
}

}  // namespace dpa::kernels::unet1d
