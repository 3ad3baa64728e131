// The plan of the loop in teams, for networks whose weights one team can stream: a team of 8 blocks runs the whole network
// of some samples, block r the r-th eighth of the channels of every convolution, over all of K. An eighth is whole GroupNorm
// groups, so the block that multiplies also normalises, and what it hands over is finished: the next GEMM's input, in its
// place and type. A phase is a convolution, the first of them (the head's) of the sample itself.
//   phase   GEMM -> sums of the warps over K in shared memory -> bias, norm, Mish, FiLM, residual -> the team's slabs
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/plans/unet1d/phases.h"

namespace dpa::kernels::unet1d {

constexpr int kTeamBlocks = 8;
constexpr int kTeamStatic = 128;  // bytes of shared memory that the kernel has by itself: its barriers, aligned
constexpr int kTeamEpilogueWarps = 4;
constexpr int kTeamPairs = 8;  // most (sample, group) pairs of a block: two of an epilogue's warp
constexpr int kTeamThreads = (kPhaseWarps + kTeamEpilogueWarps) * 32;  // the warps of the GEMMs first
constexpr int kTeamPasses = 2;                                         // most (time, four channels) items of a thread
constexpr int kTeamColumns = 64;                                       // most (sample, time) columns of a team's GEMM
constexpr int kMaxTeamPhases = kMaxConvs + 1;

struct TeamSegment {
  int64_t weights = 0;  // byte offset of the packed tiles
  int taps = 0, first = 0;
  int bias = 0;   // offset into the floats
  int steps = 0;  // along K, an even number: a warp takes pairs
};

/// Offsets and pitches in bytes, of shared memory, where they do not say words.
struct TeamPhase {
  // input
  int value = 0, skip = 0, pitch = 0, rows = 0;  // of the slabs; rows: of a sample, with the zeros around it
  int units = 1, unit_padded = 0, joined = 0;    // a unit: a slice of the packed tiles' input
  // GEMM
  int num_segments = 1, upsample = 0, time_stride = 1, columns = 0;  // columns: of a sample
  int slice_tiles = 0, row_tiles = 0;                                // row_tiles: the most of a block
  int warps_rows = 1, log_warps_k = 3, rounds = 1, column_tiles = 1;
  int table = 0;  // of the columns, and of the steps along K behind them
  TeamSegment segments[2];
  // epilogue
  int channels = 0, groups = 0, quads = 0;  // of a block; quads: four channels of a group
  int counted = 0;                          // of a group's channels, by the norm: the network's own
  int passes = 1, pass_times = 0,
      log_pair_warps = 0;  // warps of a (sample, group) pair, which take so many times a pass
  uint32_t quads_magic = 0;
  float inverse_count = 0;  // 1 / values of a (sample, group) pair
  int norm = -1, film = -1, add = 0, keep = 0;
  int times = 0, out = 0, out_pitch = 0, out_rows = 0, out_padded = 0;  // out_padded: channels of a block in the slab
  int words = 0;                                                        // in the workspace of a team, where it is used
  uint32_t own_magic = 0, times_magic = 0;                              // of channels / 4, of times
};

/// Slots of a warp's buffer of weights, as many as there is room for, and the tiles of one.
struct TeamSlots {
  int most, middle, least;
};
constexpr TeamSlots team_slots(int tile_bytes) { return {6, 4, tile_bytes == 1024 ? 3 : 2}; }
constexpr int team_slot_tiles(int tile_bytes) { return tile_bytes == 1024 ? 2 : 4; }

struct TeamShared {
  int buffer = 0, table = 0, loads = 0, tail_values = 0, tail_words = 0, sample = 0, head = 0, sums = 0, statistics = 0,
      slabs = 0, bytes = 0;
};

struct TeamPlan {
  std::vector<TeamPhase> phases;  // the head's, then a convolution each; the last one's output is the tail's input
  TeamShared shared;
  int samples = 1, teams = 1;           // samples: the most of a team
  int halo = 0;                         // zero rows before and behind a sample's
  int buffer_slots = 0;                 // of a warp's buffer of weights
  int warp_loads = 0;                   // the most slots of a warp in a step of the loop
  int slab_bytes = 0, sum_segment = 0;  // sum_segment: floats from a segment's sums to the next one's
  int words = 0;                        // of a team in the workspace, hand-over by words alone
  std::string error;
};

/// `teams` at most; `shared`: the most bytes of shared memory that a block may have. Refused (error): sizes that the form does not serve.
TeamPlan make_teams(const Plan& plan, int batch, int horizon, int teams, int shared);
/// Bytes of the workspace: a word, then those of every team.
size_t team_workspace_bytes(const TeamPlan& plan);
/// Microseconds of a step on an H100, where a team is a cluster, within a fifth.
double team_time(const TeamPlan& plan, DType dtype, int horizon);
/// The loop in teams of a call: teams at once, clusters or as many as the multiprocessors make, which hand over by
/// words; samples of a launch, 0 where the form does not serve the sizes; microseconds of a step in all launches, as estimated.
struct TeamCall {
  bool clusters = false;
  int teams = 0, samples = 0;
  double time = 0;
};
/// Cut into launches of at most `teams` clusters, as the time says; and the faster of both kinds.
TeamCall team_parts(const Plan& plan, int batch, int horizon, int teams, int shared);
TeamCall team_call(const Plan& plan, int batch, int horizon, const Device& device);

}  // namespace dpa::kernels::unet1d
