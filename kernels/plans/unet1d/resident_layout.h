// The resident path as data: what one block does in each layer, and how its shared memory is divided. No CUDA calls.
#pragma once
#include "kernels/plans/unet1d/call.h"

namespace dpa::kernels::unet1d {

constexpr int kConsumerWarps = 8;
constexpr int kStageBytes = 16384, kMaxStages = 13;  // of the circular buffer through which weights stream on Hopper
constexpr int kProducerWarps = 4;  // of bulk copies a thread would do, but registers move between groups of four warps
constexpr int kSlicesIn = 8;       // slices of the input channels
constexpr int kMostGroups = 4;     // GroupNorm groups of a slice: one, two or four

// Of a warp's partial sums in the one-sample kernel, for each channel pair a thread; on Hopper, where a block has one
// slice of the packed tiles.
constexpr int kSoloShareFloats = 320;

/// Tiles of weights that a thread of the one-sample kernel holds before it multiplies, as many as registers allow: on
/// Hopper, out of the circular buffer, and of that the stages that its block takes at once for it, or more; elsewhere,
/// where they come from memory.
constexpr int solo_held_tiles(bool bulk, int pairs, int weight_bytes) {
  const int words = pairs <= 2 ? 20 : 16;  // of 16 bytes
  return weight_bytes == 4 ? words / 2 : weight_bytes == 2 ? words : bulk ? 20 : 2 * words;
}
constexpr int solo_stages(int pairs) { return pairs <= 2 ? 5 : 4; }

/// The least channel pairs a thread of a one-sample kernel that has code for a GEMM of these tiles; 0: none has.
constexpr int solo_least_pairs(int row_tiles, int column_tiles) {
  const int tiles = row_tiles * column_tiles;
  return tiles > 8 ? 0 : column_tiles == 1 || tiles == 2 ? 1 : tiles == 4 ? 2 : tiles == 6 || row_tiles == 4 ? 3 : 4;
}

/// Whether the one-sample kernel for so many channel pairs a thread has code for a GEMM of these tiles. Not on Hopper
/// slices may be merged, so that a block has more rows than its threads have pairs.
constexpr bool solo_has_shape(bool bulk, bool wide, int pairs, int row_tiles, int column_tiles) {
  const int least = solo_least_pairs(row_tiles, column_tiles);
  if (bulk) return least > 0 && least <= pairs;
  return least > 0 ? column_tiles <= 2 * pairs : row_tiles == 16 && column_tiles == 1 && !wide && pairs == 1;
}

/// Words from one slice's partial sums to the next slice's, in the one-sample kernel, whatever the layer: 16-bit
/// weights send two sums a word.
constexpr uint32_t solo_message_stride(int pairs, bool wide) {
  return kConsumerWarps * 32 * kSlicesIn * pairs * (wide ? 2 : 1);
}

/// A GEMM's weights in a block's share, as they are streamed.
struct StreamedWeights {
  int64_t from[2];  // byte offset of the segment; a block's slice follows the previous block's
  int tiles[2];     // 16 x 16 tiles of a slice
  int num_segments;
};

/// One GEMM in a block's share, of 16 times its row tiles output channels and one slice of input channels, with all sizes
/// multiplied out: the less a block computes between layers, the faster. Bytes are of shared memory, words of messages,
/// floats of the packed floats. The 8 warps share K alone.
struct alignas(16) SoloLayer {
  // What becomes of the layer's output.
  int message, residual_message, channels;
  int half_log2, pairs, bias, other_bias;  // channel pairs of a slice: a power of two; of all times
  int norm, film, skip_out, flags;         // offsets or -1
  // The layer's GEMM.
  int pitch, input, skip_in, skip_bytes;  // bytes from row to row, to time 0; of a skip's channels within a row
  int stride, columns, steps[2];          // bytes from column to column; steps of K
  int first[2], steps_per_tap, steps_inverse;
  int tap_bytes, shape, out[2];     // bytes from a tap to the next, less its steps; row tiles << 4 | column tiles
  int out_stride, last_row, scale;  // scale: float offset of the segments' scales, where weights are e4m3
  float inverse_count;              // of the values of a group
  int counted;                      // channel pairs of a group that have values of it: the others are zero
};
/// kSoloOdd: of the last counted pair one channel is a value. Above these, from kSoloGroupShift on: the binary logarithm of
/// a group's channel pairs.
enum SoloFlags { kSoloAdd = 1, kSoloKeep = 2, kSoloOdd = 4 };
constexpr int kSoloGroupShift = 4;

struct ResidentLayout {
  int count = 0;                       // GEMMs
  SoloLayer solo[kMaxConvs + 1] = {};  // [0]: what becomes of the first convolution's output
  StreamedWeights weights[kMaxConvs + 1] = {};
  int pairs = 0;  // channel pairs a thread finishes: 1 to 4
  int blocks = 0, halo = 0;
  int merged_log2 = 0;  // slices of the packed tiles' output channels that a block owns, where there are fewer blocks
  int threads = 0;      // of a block
  int at_once = 0;      // stages that bulk copies fill at a time, at most
  int share = 0;        // floats of a warp's partial sums, not on Hopper
  int tile_bytes = 0;
  // Of the packed tiles between these offsets, one stage in `kept_every` of a block's slice is asked to stay in L2; not on
  // Hopper, a part of all tiles.
  int64_t kept_begin = 0, kept_end = 0;
  int kept_every = 1;
  float kept_part = 0.0f;
  int64_t tail_message = 0;   // words (slices of the output, slices_in, B T A)
  int64_t message_words = 0;  // of all
  // Byte offsets in shared memory.
  int buffer = 0, stages = 0, input = 0, input_low = 0, stash = 0, residual = 0, sums = 0, partial = 0, head = 0,
      head_residual = 0, tail = 0, sample = 0, descriptors = 0;
  int shared_bytes = 0;
  bool parts = false;  // a norm has several groups in a slice; or, in float32, counts an odd number of channels
  bool fits = false;
};

/// The layout for calls of one sample. On Hopper weights come by bulk copies and a block has one slice of the packed
/// tiles; elsewhere they come to registers, and a block has as many slices as let all blocks be present at once.
ResidentLayout resident_layout(const Plan& plan, int horizon, const Device& device);

}  // namespace dpa::kernels::unet1d
