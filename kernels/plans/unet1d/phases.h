// The network as phases of one persistent kernel: the plan of the loop in phases. A phase is a GEMM with what its consumer
// does folded into the load of its input, so that a convolution costs one hand-over:
//   input   value = sum over partials of the previous phase's output;  norm: mish(group_norm(value)), then FiLM;
//           value += residual;  the joined skip connection beside it
//   output  partial sums of slice k of the input channels, to be added by whoever reads them
// Where many tiles would finish the same input, a phase of its own does so once (kFinish), and the GEMM's tiles read
// finished floats: a hand-over more, but no sums, norms and room for them in every tile, so tiles have more columns and
// weights are read fewer times.
// A phase's tiles are slices_out x slices_in x slices_batch. A slice of the input channels is whole GroupNorm groups and
// a slice of the batch whole samples, so that the block of a tile normalises its own input and no statistics travel.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/math/host_device.h"
#include "kernels/plans/unet1d/plan.h"

namespace dpa::kernels::unet1d {

constexpr int kPhaseWarps = 8;
constexpr int kGroupValues = 4;        // of a thread, at most, where a tile is one group of a sample: in registers
constexpr int kPhaseStatistics = 512;  // most (sample, group) pairs of a tile
constexpr int kPhaseEntry = 672;       // bytes of a phase in a block's table
constexpr int kMaxPhases = 2 * kMaxConvs + 2;
constexpr int kPhaseCounts = kPhaseWarps * kMaxPhases * 4;  // bytes of the warps' numbers of runs, before the loop
// Most column tiles (of 8) that a warp accumulates; of float32, which has two accumulators for each.
constexpr int kPhaseColumnTiles = 16, kPhaseWideColumnTiles = 8;
// Slots of a warp's buffer of weights, a pair of tiles each. Fewer where tiles need the room: two thirds of all, three or
// two. A slot is filled again once its pair is in registers.
constexpr int kPhaseSlots = 12, kPhaseE4m3Slots = 16, kPhaseWideSlots = 6, kPhaseFewSlots = 3, kPhaseLeastSlots = 2;
DPA_HOST_DEVICE constexpr int fewer_slots(int all) { return all * 2 / 3; }

enum class PhaseKind : int { kFinish, kConv, kTail, kSampler };
/// kPartials: partial sums of a phase.  kFinished: floats that a phase keeps or is there to make.  kHead: of the sample,
/// computed on load.
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
/// The same of two entries of the phases' table, of this phase and the next, behind the buffer of weights; the bytes of
/// all.
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

/// Whether a phase of its own finishes the input of a convolution.
enum class Finish { kByTime, kNever, kAlways };

struct PhasePlan {
  std::vector<Phase> phases;
  int finishes = 0;  // of them, phases that finish an input
  PhaseShared shared;
  int ring_slots = 0;
  int sample_words = 0;                     // offset of the sample in the workspace
  int output_words = 0, output_slices = 1;  // offset of the tail's partial sums, and their number
  int workspace_words = 0;                  // zeros before a launch
  int table_bytes = 0;                      // of all phases' columns and offsets
  int warp_runs = 0;                        // the most runs of a warp in a step
  double clocks = 0;                        // of a step, by the model that chose tilings and finished inputs
  std::string error;
};

/// Tiles that a warp multiplies one after another: the place of the first in units of 16 bytes; their number, and, from
/// bit 16, how many tiles lie from one to the next.
struct alignas(8) PhaseRun {
  uint32_t from, tiles;
};

/// Reads the packed tiles of `plan`. There is a block a multiprocessor, all at once.
PhasePlan make_phases(const Plan& plan, int batch, int horizon, const Device& device, Finish finish = Finish::kByTime);
/// The same, made once for each of the sizes; for other threads too.
std::shared_ptr<const PhasePlan> phases_of(const Plan& plan, int batch, int horizon, const Device& device);
/// Bytes of the workspace of a launch: the messages, every warp's runs, every block's table of phases.
size_t phase_workspace_bytes(const PhasePlan& plan, const Device& device);

/// Bytes in a slot of a warp's buffer of weights: two tiles.
inline int phase_slot_bytes(DType dtype) { return 2 * 256 * element_bytes(dtype); }
/// A tile's activations in shared memory, the operand of its GEMM: bytes from a row of channels to the next, an odd
/// number of sixteens, so that eight rows lie in different banks; from a sample's first row to the next sample's, with
/// `pad` rows of zeros between them, which both read, and so much more that the rows of eight neighbouring times lie in
/// different banks whichever samples they are of. Rows of zeros lie before the first sample and behind the last, too.
DPA_HOST_DEVICE constexpr int slab_row(int channels, int element_bytes) { return channels * element_bytes + 16; }
DPA_HOST_DEVICE constexpr int slab_sample(int times, int pad, int row) {
  return (times + pad) * row + (-pad * (row / 16) & 7) * 16;
}
/// x / divisor = mulhi(x, magic) for x * divisor < 2^32, divisor > 1.
inline uint32_t magic_of(int divisor) {
  return divisor > 1 ? static_cast<uint32_t>(((uint64_t{1} << 32) + divisor - 1) / divisor) : 0;
}

}  // namespace dpa::kernels::unet1d
