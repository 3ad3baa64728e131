// The clustered path as data: how each product is divided among clusters and blocks, where what it hands over lies, and
// when that memory may be written again. No CUDA calls.
#pragma once
#include "kernels/math/host_device.h"
#include "kernels/unet1d/plan.h"

namespace dpa::kernels::unet1d {

constexpr int kClusters = 8, kClusterBlocks = 16;  // all of them are there at once
constexpr int kSlices = 8;                         // of the packed weights' input channels
constexpr int kChunkSamples = 16;                  // at most, of one launch
constexpr int kTileRows = 64, kTileColumns = 64;
constexpr int kSumsPitch = kTileRows + 4;           // floats from a column of sums to the next
constexpr int kRingSteps = 4;                       // steps of K in a stage of the ring
constexpr int kRingStageBytes = kRingSteps * 2048;  // 64 rows x 16 channels a step
constexpr int kMinRingStages = 4, kMaxRingStages = 12;
constexpr int kGroupThreads = 128;                   // a warpgroup
constexpr int kMaxWords = 8 * kGroupThreads;         // of 16 bytes, that a block receives for a product
constexpr int kMaxSteps = 56, kMaxSecondSteps = 16;  // of K, of a block, by segment
constexpr int kClusterSharedBytes = 112 * 1024;      // two blocks a multiprocessor

/// One product. A tile is 64 output channels times all times of some samples. Its sum over K is shared by `ways`
/// blocks: 8, each with the input channels of a slice, so that a cluster has two tiles, neighbours in their channels;
/// or 16, where two blocks share a slice, or have one of the value and one of the skip.
///   samples of a cluster: tile `cluster >> (3 - sample_tiles_log2)` of the chunk's; so a cluster's samples in one
///   product contain its samples in any other with as many tiles or more.
///   units: (GroupNorm group, sample) pairs of a tile; block r of those that share a tile finishes unit r `share_units`
///   and the next ones. A unit has `unit_threads` threads of 4 channels each; half a group is a unit where groups
///   have 128 channels, and blocks r of the cluster's two tiles complete one another.
/// Messages hold a product's output as (channels / 8, times, samples of the chunk) words of 8 channels.
struct alignas(16) ClusterLayer {
  int64_t weights[2];                           // byte offset of a segment
  int taps[2], steps[2];                        // steps of K: of a segment, this block's
  int steps_log2;                               // the same a tap
  int packed_steps;                             // a tap, in the packed weights; of all blocks that share a slice
  int packed_tiles_log2;                        // row tiles of 16 side by side in the packed weights
  int ways, sample_tiles_log2, row_tiles_log2;  // row tiles: of 64, a segment
  int samples_log2, columns_log2;               // of a tile
  int num_segments, stride, upsample;
  // Input: from octet slice * slice_octets + half * half_octets of source[half] on.
  int64_t source[2];
  int octets, slice_octets, half_octets, times_in_log2, pad, rows;  // rows: of an octet, in shared memory
  // Where each step's columns begin, in units of 16 bytes from the block's input on: the first segment's, the second's.
  alignas(8) uint16_t inputs[kMaxSteps + kMaxSecondSteps];
  // Output.
  int64_t message;  // byte offset, or -1 after the last product
  int times_log2, times_out_log2, channels;
  int bias[2], norm, film, add, keep;                                         // offsets into the floats, or -1; flags
  int group_log2, quads_log2, unit_threads_log2, share_units, units, paired;  // group: units side by side in a tile
  float inverse_count;
  uint64_t resets;  // bit j: what product j handed over has been read, and is made unwritten again
};

/// Where a layer's tile and this block's share of it lie.
struct Place {
  int way;                // 0: 8 blocks share the tile, 1: 16
  int first_peer;         // of the blocks that share the tile
  int finisher;           // this block's rank among them
  int sample0;            // first sample of the tile, in the chunk
  int segment, row_tile;  // segment: of an upsampling product
  DPA_HOST_DEVICE Place(const ClusterLayer& l, int cluster, int rank) {
    way = l.ways == 16;
    first_peer = way ? 0 : rank & 8;
    finisher = way ? rank : rank & 7;
    const int clusters_log2 = 3 - l.sample_tiles_log2;
    sample0 = cluster >> clusters_log2 << l.samples_log2;
    const int mine = cluster & ((1 << clusters_log2) - 1), tile = way ? mine : 2 * mine + (rank >> 3);
    segment = tile >> l.row_tiles_log2, row_tile = tile & ((1 << l.row_tiles_log2) - 1);
  }
};

/// Four channels of one unit, at one time, that a thread of a warpgroup finishes.
struct Share {
  bool valid;
  int unit;               // of this block
  int row, sample, time;  // row: of the tile; sample: of the chunk
  int channel, sum;       // sum: float offset in a tile of sums
  DPA_HOST_DEVICE Share(const ClusterLayer& l, const Place& p, int thread) {
    unit = thread >> l.unit_threads_log2;
    const int all = p.finisher * l.share_units + unit;
    valid = unit < l.share_units && all < l.units;
    const int quad = thread & ((1 << l.quads_log2) - 1), in_tile = all >> l.group_log2;
    time = thread >> l.quads_log2 & ((1 << l.times_log2) - 1);
    row = (((all & ((1 << l.group_log2) - 1)) << l.quads_log2) + quad) * 4;
    sample = p.sample0 + in_tile;
    channel = p.row_tile * kTileRows + row;
    sum = ((time << l.samples_log2) + in_tile) * kSumsPitch + row;
  }
  /// Where its word goes, from the layer's message on.
  DPA_HOST_DEVICE int64_t word(const ClusterLayer& l, const Place& p, int chunk_log2) const {
    const int t = l.upsample ? 2 * time + p.segment : time;
    return ((((static_cast<int64_t>(channel >> 3) << l.times_out_log2) + t) << chunk_log2) + sample) * 16 +
           (channel & 4) * 2;
  }
};

struct ClusterLayout {
  bool fits = false;
  int count = 0;  // layers[0]: the first convolution, its output alone
  int chunk_log2 = 0;
  ClusterLayer layers[kMaxConvs + 1] = {};
  int64_t message_bytes = 0, tail_message = 0;
  int64_t kept_bytes = 0;  // of the packed tiles, from the first on: asked to stay in L2
  // Byte offsets in shared memory. Sums take the activations' place when the product is done.
  int activations = 0, ring = 0, residual = 0, sample = 0, descriptors = 0, stages = 0, shared_bytes = 0;
};

/// The layout for `batch` samples, of which one launch takes at most kChunkSamples.
ClusterLayout cluster_layout(const Plan& plan, int batch, int horizon);

/// Whether a call of these sizes should take this path by itself: it fits, it is faster than the others, and the kernel
/// has been compared with float64 on networks and sizes like these.
bool cluster_serves(const Plan& plan, int batch, int horizon);

}  // namespace dpa::kernels::unet1d
