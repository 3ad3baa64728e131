// What the U-Net computes, as data: the list of its GEMMs, where their packed weights lie, and what becomes of each
// GEMM's output. No CUDA here: a plan is made and tested on any machine.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/common/dtype.h"

namespace dpa::kernels::unet1d {

constexpr int kMaxLevels = 5;
constexpr int kMaxConvs = 10 * kMaxLevels - 2;
constexpr int kStampBytes = 128;
constexpr int kFinalGroups = 8;  // of the last Conv1dBlock, whatever num_groups is

/// Channels of an activation, and those of them that are the network's (Config::own_dims).
struct Width {
  int channels, own;
};

/// The architecture. global conditioning of width cond_dim (0: none); film_scale: FiLM has a scale besides its shift;
/// relu: behind the norms is ReLU in place of Mish, which teams, phases, layers and the CPU have.
struct Config {
  int action_dim = 2;
  int levels = 3;
  int down_dims[kMaxLevels] = {256, 512, 1024};
  int kernel_size = 5;
  int num_groups = 8;
  int step_dim = 256;
  int cond_dim = 0;
  bool film_scale = true, relu = false;
  // Where widths that kernels like are down_dims: the network's own, in as many groups. The channels that only fill a
  // group up have zero weights, so they are zero everywhere, and GroupNorm does not count them. All 0: down_dims.
  int own_dims[kMaxLevels] = {};

  bool widened() const { return own_dims[0] > 0; }
  /// As the ops' configs have them: 1: FiLM has a scale; 2: ReLU.
  int flags() const { return film_scale + 2 * relu; }
  /// LoopArguments::steepness.
  float steepness() const { return relu ? std::numeric_limits<float>::max() : 1.0f; }
  Width width(int level) const { return {down_dims[level], widened() ? own_dims[level] : down_dims[level]}; }
};

/// The taps of a GEMM over neighbouring times: out[t] += sum_i W_i in[t * stride + first + i].
struct Segment {
  int64_t weights = 0;  // byte offset of the packed tiles
  int taps = 0;
  int first = 0;
};

/// One GEMM, and what its consumer does with its raw output:
///   value = raw + bias;  norm: value = mish(group_norm(value)), or relu, then FiLM;  add: value += residual;
///   keep: residual = value;  skip: skips[skip] = value
/// A second segment is the 1x1 residual convolution of the same input (its output becomes `residual`), or, in an
/// upsampling GEMM, the odd output times.
struct Conv {
  Segment segments[2];
  int num_segments = 1;
  int channels_in = 0, channels_skip = 0, channels_out = 0;  // the input is cat(previous value, skips[skip_in])
  int counted = 0;                                           // of channels_out by GroupNorm: the network's own
  int slices_in = 1;                                         // of its tiles: whole GroupNorm groups of the input
  int skip_in = -1;
  int level_in = 0, level_out = 0;  // times: horizon >> level
  int stride = 1;
  bool upsample = false;
  int64_t bias[2] = {0, 0};  // offsets into the floats
  int64_t scale = -1;        // of the segments' scales, C of each, where the tiles are e4m3
  int64_t norm = -1;         // offset of gamma (C) and beta (C), or -1
  int groups = 0;
  int64_t film = -1;  // offset into a FiLM row of scale (C, where film_scale) and shift (C), or -1
  bool add = false, keep = false;
  int skip = -1;
};

/// The first convolution and its residual, from the sample itself: weights (taps * A, C) and (A, C) in floats.
struct Head {
  int64_t weights = 0, bias = 0, residual = 0, residual_bias = 0, norm = 0, film = 0;
};
/// The 1x1 convolution to the actions: weights (A, C) in floats.
struct Tail {
  int64_t weights = 0, bias = 0;
};

/// An original tensor: its state-dict key and shape. A dimension is packed as `groups` times `width`, of which the
/// original has `own`, before zeros; groups = 0: as it is.
struct WeightInfo {
  struct Fill {
    int groups = 0, own = 0, width = 0;
  };
  std::string name;
  std::vector<int> shape;
  Fill fill[2];
};

/// dst[(i * n1 + j) * n2 + l] = src[offset + i * s0 + j * s1 + l * s2], into floats or into the weights' type. Biases
/// in front of a norm are copied as they differ from their mean over a group, of its first `counted` channels: the norm
/// does not see the rest, and 16-bit sums and moments of what is left cancel less. The others of a group stay.
struct CopyItem {
  int weight;
  bool to_float;
  int64_t destination;  // byte offset
  int64_t offset;
  int n[3];
  int64_t stride[3];
  int groups = 0, counted = 0;  // of a vector; 0: as it is
};
/// The tiles of a segment; `weight` -1 is the identity. Tap i reads the original's tap_first + i * tap_step.
struct TileItem {
  int weight, conv, segment;
  int64_t stride_out, stride_in, stride_tap;
  int tap_first, tap_step, tap_count;  // tap_count: of the original
};

struct Plan {
  Config config;
  DType dtype = DType::kFloat32;  // of the tiles
  std::string error;              // why the architecture is refused; empty when it is not

  std::vector<WeightInfo> weights;
  std::vector<CopyItem> copies;
  std::vector<TileItem> tiles;

  std::vector<Conv> convs;
  Head head;
  Tail tail;
  int slices_out = 1, slices_in = 1;  // of the tiles: slices_in is 8 where every GEMM's input is cut into 8 slices

  int64_t floats = 0;                    // byte offset of the floats
  int64_t film_step = 0, film_cond = 0;  // byte offsets: (film_rows, step_dim), (film_rows, cond_dim)
  int64_t film_bias = 0;                 // float offset (film_rows)
  int64_t step_weights[2] = {0, 0}, step_bias[2] = {0, 0};  // byte offsets (4 D, D), (D, 4 D); float offsets
  int film_rows = 0;
  int64_t stamp = 0;  // byte offset of kStampBytes for the CPU packer's mark, which the GPU's leaves alone
  int64_t tile_bytes = 0, packed_bytes = 0;
};

/// The plan of an architecture for weights of type float32, bfloat16, float16 or e4m3. Check `error` first.
/// e4m3: w = scale q with a scale an output channel, the largest magnitude of its weights over 448; the GEMMs'
/// activations are float16, and so are the weights outside the convolutions.
Plan make_plan(const Config& config, DType dtype);

/// What decides how a call is run.
struct Device {
  int multiprocessors = 0, shared_bytes = 0;  // shared_bytes: the most of a block
  bool hopper = false;                        // compute capability 9.0, and kernels built for it
  bool clusters = false;                      // the clusters of the kernel for several samples fit
  int team_clusters = 0;                      // clusters of a team's blocks that fit at once; none: teams go by words
};

/// Places one behind another, whose sizes are rounded up to `align`.
template <class N>
struct Places {
  N align, at = 0;
  N operator()(N size) {
    const N begin = at;
    at += (size + align - 1) / align * align;
    return begin;
  }
};

/// Bytes of one weight in a tile.
inline int element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat8E4M3 ? 1 : 2; }
/// The type of the weights outside the tiles: the time embedding's and FiLM's.
inline DType dense_dtype(DType dtype) { return dtype == DType::kFloat8E4M3 ? DType::kFloat16 : dtype; }
inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int round_up(int n, int to) { return (n + to - 1) / to * to; }
inline bool power_of_two(int n) { return n > 0 && (n & (n - 1)) == 0; }
/// The least log with 2^log >= n.
inline int log2_of(int n) {
  int log = 0;
  while ((1 << log) < n) log++;
  return log;
}

/// The tiling of a GEMM: 16 x 16 tiles (output channels x input channels of one tap), for each of
/// plan.slices_out x conv.slices_in parts (slices_in fastest) the steps along K (tap, then channels), for each the rows' tiles.
struct Tiling {
  int rows, row_tiles;       // output channels of a slice, and their tiles
  int in, skip;              // channels of an input slice: of the value, of the skip
  int in_steps, skip_steps;  // the same in steps of 16 channels
  int steps_per_tap() const { return in_steps + skip_steps; }
};
Tiling tiling(const Plan& plan, const Conv& conv);

/// Multiplications, with an addition each, of the GEMMs of a pass.
int64_t multiply_adds(const Plan& plan, int batch, int horizon);

/// Element (row, channel) of a tile in the order that matrix instructions hold it. A tile of float32 is two of float16:
/// the high halves, then the low ones (math/two_halves.h).
inline int tile_index(int row, int channel) {
  return ((row % 8) * 4 + channel % 8 / 2) * 8 + (channel & 1) + (row >= 8 ? 2 : 0) + (channel >= 8 ? 4 : 0);
}

/// What a block has just done when it notes its clock, in each layer; a layer without a norm does not note kNormalised,
/// and the last one, behind which is the 1x1 convolution to the actions, not kMultiplied.
enum Mark { kBegin, kWeightsThere, kMessagesThere, kNormalised, kInputWritten, kMultiplied, kPublished, kMarks };

}  // namespace dpa::kernels::unet1d
