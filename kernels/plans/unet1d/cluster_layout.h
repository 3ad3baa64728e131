// The clustered path as data: how each GEMM is divided among clusters and blocks, where what it hands over lies, and
// when that memory may be written again. No CUDA calls.
#pragma once
#include "kernels/math/host_device.h"
#include "kernels/plans/unet1d/plan.h"

namespace dpa::kernels::unet1d {

constexpr int kClusters = 8, kClusterBlocks = 16;   // all of them are there at once
constexpr int kSlices = 8;                          // of the packed weights' input channels
constexpr int kMinSamples = 4, kChunkSamples = 16;  // of one launch; fewer are filled up, but for one on its own
constexpr int kTileRows = 64, kTileColumns = 64;
constexpr int kStageSteps = 4;  // steps of K in a stage of the circular buffer
constexpr int kMinClusterStages = 4, kMaxClusterStages = 16;
constexpr int kGroupThreads = 128;                     // a warpgroup
constexpr int kMaxWords = 8 * kGroupThreads;           // of 16 bytes, that a block receives for a GEMM
constexpr int kMaxInputs = 48, kMaxSecondInputs = 16;  // of a block, by segment: ClusterLayer::inputs
constexpr int kMaxClusterConvs = 28;
constexpr int kClusterSharedBytes = 114944;  // two blocks a multiprocessor, with what they have besides

/// One GEMM. A tile is 64 output channels times all times of some samples. Its sum over K is shared by `ways`
/// blocks: 8, each with the input channels of a slice, so that a cluster has two tiles, neighbours in their channels;
/// 16, where two blocks share a slice, or have one of the value and one of the skip; or 4, with two slices each, so
/// that a cluster has four tiles.
///   samples of a cluster: tile `cluster >> (3 - sample_tiles_log2)` of the chunk's; so a cluster's samples in one
///   GEMM contain its samples in any other with as many tiles or more.
///   units: (GroupNorm group, sample) pairs of a tile, or of a cluster's two tiles where groups have 128 channels
///   (`paired`). A unit is a row of shares, 8 rows by two times by two channels each. Each of the first blocks that
///   share the tile or the pair finishes 1 << shares_log2 of them, whole units: they receive the partial sums of their
///   shares from all blocks that have some.
///   one sample on its own (ClusterLayout::alone): a cluster has all channels of a group, and each of its blocks
///   finishes a part of it; the blocks exchange moments. Times are then a power of two, of which the last may be none
///   of the signal's: they are zeros.
/// Messages hold a GEMM's output as (channels / 8, times, samples of the chunk) words of 8 channels.
struct alignas(16) ClusterLayer {
  int64_t weights[2];                               // byte offset of a segment
  int64_t source[2];                                // of the input, below
  int64_t message;                                  // of the output, or -1 after the last GEMM
  int bias[2], norm, film, scale[2];                // offsets into the floats, or -1
  float inverse_count;                              // of a GroupNorm group
  int16_t taps[2], steps[2];                        // steps of K: of a segment, this block's
  int16_t steps_log2;                               // the same a tap
  int16_t packed_steps;                             // a tap, in the packed weights; of all blocks that share a slice
  int16_t slices;                                   // of a block: 2 where 4 blocks share a tile, else 1
  int16_t packed_tiles_log2;                        // row tiles of 16 side by side in the packed weights
  int16_t ways, sample_tiles_log2, row_tiles_log2;  // row tiles: of 64, a segment
  int16_t samples_log2, columns_log2;               // of a tile
  int16_t num_segments, stride, upsample;
  // Input: from octet slice * slice_octets + half * half_octets of source[half] on; of the first `first_octets`, the
  // others from source[1].
  int16_t octets, first_octets, slice_octets, half_octets, times_in_log2;
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
  int16_t units, shares_log2, finishers, paired;  // of those that share the units
  int16_t pitch;                                  // bytes that a finisher receives from each block
  int16_t next_by_all;                            // whether all of a cluster share the next GEMM's units
};

/// Where a layer's tile and this block's share of it lie.
struct ClusterTile {
  int part;               // this block's rank among those that share the tile
  int half;               // of a slice, where 16 blocks share the tile
  int slice;              // the first one of the block's input
  int first_peer, peers;  // of the blocks that share the units
  int finisher;           // this block's rank among those
  int sample0;            // first sample of the tile, in the chunk
  int segment, row_tile;  // segment: of an upsampling GEMM
  int first_channel;      // of the units
  DPA_HOST_DEVICE ClusterTile(const ClusterLayer& l, int cluster, int rank) {
    const bool all = l.ways == 16, few = l.ways == 4;
    const int tiles_log2 = all ? 0 : few ? 2 : 1;  // of a cluster
    part = rank & (l.ways - 1);
    half = all ? rank >> 3 : 0;
    slice = few ? 2 * part : rank & 7;
    first_peer = l.paired ? 0 : rank - part, peers = l.paired ? 16 : l.ways;
    finisher = rank - first_peer;
    const int clusters_log2 = 3 - l.sample_tiles_log2;
    sample0 = cluster >> clusters_log2 << l.samples_log2;
    const int mine = cluster & ((1 << clusters_log2) - 1), tile = (mine << tiles_log2) + (rank >> (4 - tiles_log2));
    segment = tile >> l.row_tiles_log2, row_tile = tile & ((1 << l.row_tiles_log2) - 1);
    first_channel = (l.paired ? row_tile & ~1 : row_tile) * kTileRows;
  }
};

/// A block sends a GEMM's sums when their receivers have read the last ones. Each finisher acknowledges to all that may
/// send to it next: the blocks that share its units, and the whole cluster where the next GEMM's units are shared by
/// others. These are the ranks that it acknowledges to, and the finishers from which a block waits for an
/// acknowledgement, a bit each.
struct AckTargets {
  int first, count;
  uint32_t by;
  DPA_HOST_DEVICE AckTargets(const ClusterLayer& l, const ClusterTile& p) {
    const bool all = p.peers == kClusterBlocks || l.next_by_all;
    first = all ? 0 : p.first_peer, count = all ? kClusterBlocks : p.peers;
    by = 0;
    for (int peer = first; peer < first + count; peer += p.peers) by |= ((1u << l.finishers) - 1) << peer;
  }
};

/// What a thread of a warpgroup finishes: channels `channel` and `channel` + 8 at times `time` and `time` + gap of one
/// sample. Lanes side by side in fours have the same channels, and four rows of such fours make up 8 x 8 values.
struct ThreadShare {
  bool valid;  // the same for a warp
  int sample;  // of the chunk
  int channel, time, gap;
  DPA_HOST_DEVICE ThreadShare(const ClusterLayer& l, const ClusterTile& p, int thread) {
    const int mine = (thread & 3) | thread >> 5 << 2, at = (p.finisher << l.shares_log2) + mine;
    const int tiles_log2 = l.rows_log2 - 4;
    const int pair = at & ((1 << l.pairs_log2) - 1), tile = at >> l.pairs_log2 & ((1 << tiles_log2) - 1);
    const int unit = at >> (l.pairs_log2 + tiles_log2);
    valid = mine < 1 << l.shares_log2 && unit < l.units;
    sample = p.sample0 + (unit >> l.group_log2);
    channel = p.first_channel + ((unit & ((1 << l.group_log2) - 1)) << l.rows_log2) + tile * 16 + (thread >> 2 & 7);
    gap = 1 << l.gap_log2;
    time = ((pair & ((1 << l.pair_steps_log2) - 1)) << l.step_log2) + (pair >> l.pair_steps_log2 << l.next_log2);
  }
  /// The share of the unit's 16-row tile `tile` and a pair of times, among all of those who share the units; the
  /// thread that finishes its row `row`, of the finisher `share >> shares_log2`.
  static DPA_HOST_DEVICE int share(const ClusterLayer& l, int unit, int tile, int pair) {
    return ((unit << (l.rows_log2 - 4)) + tile) << l.pairs_log2 | pair;
  }
  static DPA_HOST_DEVICE int thread(const ClusterLayer& l, int share, int row) {
    const int at = share & ((1 << l.shares_log2) - 1);
    return (at & 3) | row << 2 | at >> 2 << 5;
  }
};

/// Where a thread writes what its warp has finished, after an 8 x 8 transposition: channels 2 i and 2 i + 1 of an octet
/// of one sample and time, i = lane % 4; and the same of the next octet.
struct OutputWord {
  bool valid;
  int64_t at, next;  // byte offsets in the layer's message
  DPA_HOST_DEVICE OutputWord(const ClusterLayer& l, const ClusterTile& p, int thread, int chunk_log2) {
    const ThreadShare s(l, p, (thread & 31) >> 3 | (thread & ~31));
    const int time = s.time + (thread & 4 ? s.gap : 0), t = l.upsample ? 2 * time + p.segment : time;
    valid = s.valid;
    at = ((((static_cast<int64_t>(s.channel >> 3) << l.times_out_log2) + t) << chunk_log2) + s.sample) * 16 +
         (thread & 3) * 4;
    next = at + (int64_t{16} << (l.times_out_log2 + chunk_log2));
  }
};

struct ClusterLayout {
  bool fits = false;
  bool alone = false;  // one sample, whose groups several blocks finish
  int count = 0;       // layers[0]: the first convolution, its output alone
  int chunk_log2 = 0;
  int step_bytes = 0;  // of weights: 64 rows x 16 channels
  ClusterLayer layers[kMaxClusterConvs + 1] = {};
  int64_t message_bytes = 0, tail_message = 0;  // of a step; there is room for two
  int64_t kept_bytes = 0;                       // of the packed tiles, from the first on: asked to stay in L2
  int sums_bytes = 0;                           // that a finisher receives for a segment, at most
  // Byte offsets in shared memory; sums: of the GEMM, then of the residual convolution.
  // head: of one sample on its own, the first convolution's weights of the block's 16 channels, and its residual's.
  int activations = 0, sums = 0, sample = 0, head = 0, descriptors = 0, buffer = 0, stages = 0, shared_bytes = 0;
};

/// The layout for `batch` samples, of which one launch takes at most kChunkSamples.
ClusterLayout cluster_layout(const Plan& plan, int batch, int horizon);

/// Whether a call of these sizes should take this path by itself: it fits, it is faster than the others, and the kernel
/// has been compared with float64 on networks and sizes like these.
bool cluster_serves(const Plan& plan, int batch, int horizon);

}  // namespace dpa::kernels::unet1d
