// The clustered path as data: how each GEMM is divided among clusters and blocks, where what it hands over lies, and
// when that memory may be written again. No CUDA calls.
#pragma once
#include "kernels/math/host_device.h"
#include "kernels/plans/unet1d/plan.h"

namespace dpa::kernels::unet1d {

constexpr int kClusters = 8, kClusterBlocks = 16;   // all of them are there at once
constexpr int kSlices = 8;                          // of the packed weights' input channels
constexpr int kMinSamples = 4, kChunkSamples = 16;  // of one launch; at short horizons fewer are filled up
constexpr int kTileRows = 64, kTileColumns = 64;
constexpr int kStageSteps = 4;  // steps of K in a stage of the circular buffer
constexpr int kMinClusterStages = 4, kMaxClusterStages = 16;
constexpr int kGroupThreads = 128;                     // a warpgroup
constexpr int kMaxWords = 8 * kGroupThreads;           // of 16 bytes, that a block receives for a pass
constexpr int kMaxInputs = 48, kMaxSecondInputs = 16;  // of a pass, by segment: ClusterLayer::inputs
constexpr int kMaxRoundsLog2 = 2;                      // shares of a thread
constexpr int kWholeWays = 8;                          // blocks whose sums are added at once
constexpr int kClusterSharedBytes = 114816;            // two blocks a multiprocessor, with what they have besides;
constexpr int kMomentBytes = 128;                      // less where a block has moments of several groups

/// What a layout needs of the kernel, which is compiled for each of these.
enum class ClusterForm {
  kAlone,   // one sample; a block takes its part of K at once, and every group is finished by a whole cluster
  kWhole,   // several samples; K at once, by kWholeWays blocks or twice as many; a group finished by one block, times a
            // power of two
  kPasses,  // all of it, a share a thread
  kRounds,  // all of it, where a slice is one GroupNorm group
  kGroups,  // all of it
};

/// One GEMM. A tile is 64 output channels times all times of some samples. K is the packed weights' 8 slices of input
/// channels, of which a pass takes one or two, or a part of one; the blocks that share a tile (`ways` of them) take
/// `passes` each, so a cluster has 16 / ways tiles, neighbours in their channels.
///   samples of a cluster in one GEMM contain its samples in any other with as many tiles or more.
///   units: (slice, sample) pairs of a tile, or of neighbouring tiles where a slice spans them; a slice is an eighth of the
///   channels, and one GroupNorm group, two or four. A unit is a row of shares, 8 rows by two times by two channels each.
///   The blocks that share the tiles (`peers`) finish 1 << shares_log2 of them each: a whole unit where a warpgroup holds
///   it, and then the first blocks alone; else all blocks finish as many, a unit or a part of one, and those that have a
///   part exchange moments.
///   times are a power of two, of which the last may be none of the signal's: they are zeros.
/// Messages hold a GEMM's output as (channels / 8, times, samples of the chunk) words of 8 channels.
struct alignas(16) ClusterLayer {
  int64_t weights[2];                        // byte offset of a segment
  int64_t source[2];                         // of the input: of the value, of the skip
  int64_t message;                           // of the output, or -1 after the last GEMM
  int bias[2], norm, film, scale[2];         // offsets into the floats, or -1
  float inverse_count;                       // of a GroupNorm group
  int16_t taps[2], steps[2];                 // steps of K: of a segment, in a pass
  int16_t passes, slices, parts_log2;        // of a block; of a pass; passes that share a slice
  int16_t steps_log2, packed_steps;          // of a slice's pass and tap; of a slice and tap
  int16_t packed_tiles_log2;                 // row tiles of 16 side by side in the packed weights
  int16_t ways, tiles_log2, row_tiles_log2;  // tiles: of a cluster; row tiles: of 64, a segment
  int16_t samples_log2, columns_log2;        // of a tile
  int16_t num_segments, stride, upsample;
  // Input: octets of channels of a pass; the first `first_octets` are of one source, the others of the skip.
  int16_t octets, first_octets, slice_octets, times_in_log2;
  int16_t pad, rows;  // in shared memory: times of zeros; rows of an octet
  // Where each step's columns begin, in units of 16 bytes from the block's input on: the first segment's, the second's.
  // Where `by_stage`, those of a stage's first step: its others follow two octets behind one another.
  int16_t by_stage;
  alignas(8) uint16_t inputs[kMaxInputs + kMaxSecondInputs];
  // Output; times: of the signal.
  int16_t times_log2, times_out_log2, times, channels, add, keep;
  // Units: their channels and pairs of times; how many stand side by side in a tile; how far apart a pair's times are.
  // Pairs: `steps` of them are 1 << step_log2 times apart, those of the next `steps` 1 << next_log2 behind.
  int16_t rows_log2, pairs_log2, group_log2, gap_log2, pair_steps_log2, step_log2, next_log2;
  int16_t span_log2;                      // tiles that a unit spans
  int16_t units, shares_log2, finishers;  // of those that share the units
  int16_t rounds_log2;                    // shares of a thread: neighbouring pairs of times
  int16_t exchange_log2;                  // blocks that finish a unit
  int16_t pitch;                          // bytes that a finisher receives from each block
  int16_t next_peers;                     // blocks that share the next GEMM's units
  int16_t group_shares_log2;              // of a GroupNorm group: a unit's, or half of them, a quarter
};

/// Where a layer's tile and this block's share of it lie.
struct ClusterTile {
  int part;               // this block's rank among those that share the tile
  int first_peer, peers;  // of the blocks that share the units
  int finisher;           // this block's rank among those
  int sample0;            // first sample of the tile, in the chunk
  int segment, row_tile;  // segment: of an upsampling GEMM
  int first_channel;      // of the units
  DPA_HOST_DEVICE ClusterTile(const ClusterLayer& l, int cluster, int rank) {
    part = rank & (l.ways - 1);
    peers = l.ways << l.span_log2;
    finisher = rank & (peers - 1), first_peer = rank - finisher;
    const int tile = (cluster << l.tiles_log2) + (rank >> (4 - l.tiles_log2)), above = tile >> l.row_tiles_log2;
    row_tile = tile & ((1 << l.row_tiles_log2) - 1);
    segment = above & l.upsample, sample0 = above >> l.upsample << l.samples_log2;
    first_channel = (row_tile >> l.span_log2 << l.span_log2) * kTileRows;
  }
};

/// What a block multiplies in a pass: steps of each tap from `first_step` of slice `slice` on, of the channels from
/// octet `octet` of source `source` on.
struct ClusterPass {
  int slice, first_step, source, octet;
  DPA_HOST_DEVICE ClusterPass(const ClusterLayer& l, const ClusterTile& p, int pass) {
    const int at = p.part * l.passes + pass, part = at & ((1 << l.parts_log2) - 1);
    slice = (at >> l.parts_log2) * l.slices, first_step = part << l.steps_log2;
    const int in_slice = part * l.octets;
    source = in_slice >= l.slice_octets * l.slices;
    octet = slice * l.slice_octets + (source ? in_slice - l.slice_octets : in_slice);
  }
};

/// A block sends a GEMM's sums when their receivers have read the last ones. Each finisher acknowledges to all that may
/// send to it next: the blocks that share its units, or, where those are more, the blocks that share the next GEMM's.
/// These are the ranks that it acknowledges to, and the finishers from which a block waits for an acknowledgement, a bit
/// each. Blocks that share no units with the finisher are acknowledged to on a barrier of their own: it waits for no sums
/// of theirs, so a slow one might find two acknowledgements on one barrier, which look like none. An acknowledgement
/// comes after sums, or moments made of them, that a block sends when it has seen the last one on the same barrier.
struct AckTargets {
  int first, count;
  uint32_t by, sharers;  // sharers: of the units
  DPA_HOST_DEVICE bool apart(int peer) const { return !(sharers >> peer & 1); }
  DPA_HOST_DEVICE AckTargets(const ClusterLayer& l, const ClusterTile& p) {
    count = p.peers > l.next_peers ? p.peers : l.next_peers, first = p.first_peer & ~(count - 1);
    by = 0, sharers = ((1u << p.peers) - 1) << p.first_peer;
    for (int peer = first; peer < first + count; peer += p.peers) by |= ((1u << l.finishers) - 1) << peer;
  }
};

/// What a thread of a warpgroup finishes: channels `channel` and `channel` + 8 at times `time` and `time` + gap of one
/// sample, and in further rounds `next_round` times behind. Lanes side by side in fours have the same channels, and four
/// rows of such fours make up 8 x 8 values.
struct ThreadShare {
  bool valid;  // the same for a warp
  int sample;  // of the chunk
  int channel, time, gap, next_round;
  DPA_HOST_DEVICE ThreadShare(const ClusterLayer& l, const ClusterTile& p, int thread) {
    const int mine = slot(thread) << l.rounds_log2, at = (p.finisher << l.shares_log2) + mine;
    const int tiles_log2 = l.rows_log2 - 4;
    const int pair = at & ((1 << l.pairs_log2) - 1), tile = at >> l.pairs_log2 & ((1 << tiles_log2) - 1);
    const int unit = at >> (l.pairs_log2 + tiles_log2);
    valid = mine < 1 << l.shares_log2 && unit < l.units;
    sample = p.sample0 + (unit >> l.group_log2);
    channel = p.first_channel + ((unit & ((1 << l.group_log2) - 1)) << l.rows_log2) + tile * 16 + (thread >> 2 & 7);
    gap = 1 << l.gap_log2, next_round = 1 << l.step_log2;
    time = ((pair & ((1 << l.pair_steps_log2) - 1)) << l.step_log2) + (pair >> l.pair_steps_log2 << l.next_log2);
  }
  /// The share of the unit's 16-row tile `tile` and a pair of times, among all of those who share the units; the place
  /// of its row `row` in what the finisher `share >> shares_log2` receives from a block, in units of 8 bytes.
  static DPA_HOST_DEVICE int share(const ClusterLayer& l, int unit, int tile, int pair) {
    return ((unit << (l.rows_log2 - 4)) + tile) << l.pairs_log2 | pair;
  }
  static DPA_HOST_DEVICE int place(const ClusterLayer& l, int share, int row) {
    const int at = share & ((1 << l.shares_log2) - 1);
    return (at & 3) | row << 2 | at >> 2 << 5;
  }
  /// The place of a thread's first round, which the others follow.
  static DPA_HOST_DEVICE int first_place(const ClusterLayer& l, int thread) {
    return place(l, slot(thread) << l.rounds_log2, thread >> 2 & 7);
  }

 private:
  static DPA_HOST_DEVICE int slot(int thread) { return (thread & 3) | thread >> 5 << 2; }
};

/// Where a thread writes what its warp has finished, after an 8 x 8 transposition: channels 2 i and 2 i + 1 of an octet
/// of one sample and time, i = lane % 4; and the same of the next octet, and of further rounds.
struct OutputWord {
  bool valid;
  int64_t at, next;  // byte offsets in the layer's message
  int next_round;    // bytes
  DPA_HOST_DEVICE OutputWord(const ClusterLayer& l, const ClusterTile& p, int thread, int chunk_log2) {
    const ThreadShare s(l, p, (thread & 31) >> 3 | (thread & ~31));
    const int time = s.time + (thread & 4 ? s.gap : 0), t = l.upsample ? 2 * time + p.segment : time;
    valid = s.valid;
    at = ((((static_cast<int64_t>(s.channel >> 3) << l.times_out_log2) + t) << chunk_log2) + s.sample) * 16 +
         (thread & 3) * 4;
    next = at + (int64_t{16} << (l.times_out_log2 + chunk_log2));
    next_round = s.next_round << (l.upsample + chunk_log2 + 4);
  }
};

struct ClusterLayout {
  bool fits = false;
  ClusterForm form = ClusterForm::kRounds;
  int count = 0;  // layers[0]: the first convolution, its output alone
  int chunk_log2 = 0;
  int step_bytes = 0;  // of weights: 64 rows x 16 channels
  ClusterLayer layers[kMaxConvs + 1] = {};
  int64_t message_bytes = 0, tail_message = 0;  // of a step; there is room for two
  int64_t kept_bytes = 0;                       // of the packed tiles, from the first on: asked to stay in L2
  int sums_bytes = 0;                           // that a finisher receives for a segment, at most
  // Byte offsets in shared memory; sums: of the GEMM, then of the residual convolution.
  // head: the first convolution's weights of a block's `head_channels`, and its residual's; or none.
  // activations: a buffer, or two in turns where a GEMM has several passes.
  int activations = 0, activation_bytes = 0, sums = 0, sample = 0, head = 0, head_channels = 0, descriptors = 0,
      buffer = 0, stages = 0, shared_bytes = 0;
};

/// The layout for `batch` samples, of which one launch takes at most kChunkSamples.
ClusterLayout cluster_layout(const Plan& plan, int batch, int horizon);

/// Whether a call of these sizes should take this path by itself: it fits, it is faster than the others, and the kernel
/// has been compared with float64 on networks and sizes like these.
bool cluster_serves(const Plan& plan, int batch, int horizon);

}  // namespace dpa::kernels::unet1d
