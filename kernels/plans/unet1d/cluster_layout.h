// The clustered path as data: how each GEMM is divided among clusters and blocks, where what it hands over lies, and
// when that memory may be written again. No CUDA calls.
#pragma once
#include "kernels/math/host_device.h"
#include "kernels/plans/unet1d/plan.h"

namespace dpa::kernels::unet1d {

constexpr int kClusters = 8, kClusterBlocks = 16;   // all of them are there at once
constexpr int kSlices = 8;                          // of the packed weights' input channels
constexpr int kMinSamples = 4, kChunkSamples = 16;  // of one launch; fewer are filled up
constexpr int kTileRows = 64, kTileColumns = 64;
constexpr int kStageSteps = 4;                          // steps of K in a stage of the circular buffer
constexpr int kClusterStageBytes = kStageSteps * 2048;  // 64 rows x 16 channels a step
constexpr int kMinClusterStages = 4, kMaxClusterStages = 12;
constexpr int kGroupThreads = 128;                   // a warpgroup
constexpr int kMaxWords = 8 * kGroupThreads;         // of 16 bytes, that a block receives for a GEMM
constexpr int kMaxSteps = 48, kMaxSecondSteps = 16;  // of K, of a block, by segment
constexpr int kClusterSharedBytes = 115200;          // two blocks a multiprocessor

/// One GEMM. A tile is 64 output channels times all times of some samples. Its sum over K is shared by `ways`
/// blocks: 8, each with the input channels of a slice, so that a cluster has two tiles, neighbours in their channels;
/// or 16, where two blocks share a slice, or have one of the value and one of the skip.
///   samples of a cluster: tile `cluster >> (3 - sample_tiles_log2)` of the chunk's; so a cluster's samples in one
///   GEMM contain its samples in any other with as many tiles or more.
///   units: (GroupNorm group, sample) pairs of a tile, or of a cluster's two tiles where groups have 128 channels
///   (`paired`). Each of the first blocks that share the tile or the pair finishes 1 << share_log2 of them: they
///   receive the partial sums of their units from all blocks that have some.
/// Messages hold a GEMM's output as (channels / 8, times, samples of the chunk) words of 8 channels.
struct alignas(16) ClusterLayer {
  int64_t weights[2];                               // byte offset of a segment
  int64_t source[2];                                // of the input, below
  int64_t message;                                  // of the output, or -1 after the last GEMM
  int bias[2], norm, film;                          // offsets into the floats, or -1
  float inverse_count;                              // of a GroupNorm group
  int16_t taps[2], steps[2];                        // steps of K: of a segment, this block's
  int16_t steps_log2;                               // the same a tap
  int16_t packed_steps;                             // a tap, in the packed weights; of all blocks that share a slice
  int16_t packed_tiles_log2;                        // row tiles of 16 side by side in the packed weights
  int16_t ways, sample_tiles_log2, row_tiles_log2;  // row tiles: of 64, a segment
  int16_t samples_log2, columns_log2;               // of a tile
  int16_t num_segments, stride, upsample;
  // Input: from octet slice * slice_octets + half * half_octets of source[half] on.
  int16_t octets, slice_octets, half_octets, times_in_log2;
  int16_t pad, rows;  // in shared memory: times of zeros; rows of an octet
  // Where each step's columns begin, in units of 16 bytes from the block's input on: the first segment's, the second's.
  alignas(8) uint16_t inputs[kMaxSteps + kMaxSecondSteps];
  // Output.
  int16_t times_log2, times_out_log2, channels, add, keep;
  // Units: their channels and pairs of times; how many stand side by side in a tile; how far apart a pair's times are.
  int16_t rows_log2, pairs_log2, group_log2, gap_log2;
  int16_t units, share_log2, finishers, paired;  // of those that share the units
  int16_t pitch;                                 // bytes that a finisher receives from each block
  int16_t next_by_all;                           // whether all of a cluster share the next GEMM's units
};

/// Where a layer's tile and this block's share of it lie.
struct ClusterTile {
  int way;                // 0: 8 blocks share the tile, 1: 16
  int part;               // this block's rank among them
  int first_peer, peers;  // of the blocks that share the units
  int finisher;           // this block's rank among those
  int sample0;            // first sample of the tile, in the chunk
  int segment, row_tile;  // segment: of an upsampling GEMM
  int first_channel;      // of the units
  DPA_HOST_DEVICE ClusterTile(const ClusterLayer& l, int cluster, int rank) {
    way = l.ways == 16;
    part = way ? rank : rank & 7;
    const bool all = way || l.paired;
    first_peer = all ? 0 : rank & 8, peers = all ? 16 : 8;
    finisher = rank - first_peer;
    const int clusters_log2 = 3 - l.sample_tiles_log2;
    sample0 = cluster >> clusters_log2 << l.samples_log2;
    const int mine = cluster & ((1 << clusters_log2) - 1), tile = way ? mine : 2 * mine + (rank >> 3);
    segment = tile >> l.row_tiles_log2, row_tile = tile & ((1 << l.row_tiles_log2) - 1);
    first_channel = (l.paired ? row_tile & ~1 : row_tile) * kTileRows;
  }
};

/// A block sends a GEMM's sums when their receivers have read the last ones. Each finisher acknowledges to all that may
/// send to it next: the blocks that share its units, and the whole cluster where the next GEMM's units are shared by
/// all. These are the ranks that it acknowledges to, and the finishers from which a block waits for an acknowledgement,
/// a bit each.
struct AckTargets {
  int first, count;
  uint32_t by;
  DPA_HOST_DEVICE AckTargets(const ClusterLayer& l, const ClusterTile& p) {
    const bool all = p.peers == kClusterBlocks || l.next_by_all;
    first = all ? 0 : p.first_peer, count = all ? kClusterBlocks : p.peers;
    by = ((1u << l.finishers) - 1) << p.first_peer;
    if (count > p.peers) by |= p.first_peer ? by >> 8 : by << 8;
  }
};

/// What a thread of a warpgroup finishes: channels `channel` and `channel` + 8 at times `time` and `time` + gap of one
/// sample. Lanes side by side in fours have the same channels, and four rows of such fours make up 8 x 8 values.
struct ThreadShare {
  bool valid;        // the same for a warp
  int unit, sample;  // unit: of this block; sample: of the chunk
  int channel, time, gap;
  DPA_HOST_DEVICE ThreadShare(const ClusterLayer& l, const ClusterTile& p, int thread) {
    const int at = (thread & 3) | thread >> 5 << 2, tiles_log2 = l.rows_log2 - 4;
    const int pair = at & ((1 << l.pairs_log2) - 1), tile = at >> l.pairs_log2 & ((1 << tiles_log2) - 1);
    unit = at >> (l.pairs_log2 + tiles_log2);
    const int all = (p.finisher << l.share_log2) + unit;
    valid = unit < 1 << l.share_log2 && all < l.units;
    sample = p.sample0 + (all >> l.group_log2);
    channel = p.first_channel + ((all & ((1 << l.group_log2) - 1)) << l.rows_log2) + tile * 16 + (thread >> 2 & 7);
    const int steps_log2 = l.pairs_log2 - l.gap_log2;  // pairs: those of the same offset first
    gap = 1 << l.gap_log2;
    time = ((pair & ((1 << steps_log2) - 1)) << (l.gap_log2 + 1)) + (pair >> steps_log2);
  }
  /// The thread that finishes channels `row` and `row` + 8 of the unit's 16-row tile `tile`, a pair of times.
  static DPA_HOST_DEVICE int thread(const ClusterLayer& l, int unit, int tile, int row, int pair) {
    const int at = ((unit << (l.rows_log2 - 4)) + tile) << l.pairs_log2 | pair;
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
  int count = 0;  // layers[0]: the first convolution, its output alone
  int chunk_log2 = 0;
  ClusterLayer layers[kMaxConvs + 1] = {};
  int64_t message_bytes = 0, tail_message = 0;  // of a step; there is room for two
  int64_t kept_bytes = 0;                       // of the packed tiles, from the first on: asked to stay in L2
  int sums_bytes = 0;                           // that a finisher receives for a segment, at most
  // Byte offsets in shared memory; sums: of the GEMM, then of the residual convolution.
  int activations = 0, sums = 0, sample = 0, descriptors = 0, buffer = 0, stages = 0, shared_bytes = 0;
};

/// The layout for `batch` samples, of which one launch takes at most kChunkSamples.
ClusterLayout cluster_layout(const Plan& plan, int batch, int horizon);

/// Whether a call of these sizes should take this path by itself: it fits, it is faster than the others, and the kernel
/// has been compared with float64 on networks and sizes like these.
bool cluster_serves(const Plan& plan, int batch, int horizon);

}  // namespace dpa::kernels::unet1d
