// Which tiles a 2-D convolution is cut into: pure functions of sizes and of the device.
//
// y[n, p, q, k] = sum over (r, s, c) of x[n, stride p - pad_top + r, stride q - pad_left + s, c] w[k, r, s, c]
// as a GEMM of rows (n, p, q), columns k and a contracted dimension K = (r, s, c), for rows of channels that are padded
// to whole pieces of 16 bytes. K is taken in chunks of 8 pieces (128 bytes: 64 channels of 16 bits, 32 of float32).
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/common/dtype.h"
#include "kernels/math/host_device.h"

namespace dpa::kernels::conv2d {

constexpr int kThreads = 256, kWarps = 8;
constexpr int kPieceBytes = 16, kChunkPieces = 8, kChunkBytes = kPieceBytes * kChunkPieces;
constexpr int kMaxSplits = 8;    // blocks that share the K of a tile
constexpr int kMaxPairs = 64;    // (sample, group) pairs of a tile
constexpr int kMaxKernel = 15;   // rows or columns of a filter
constexpr int kMaxTogether = 4;  // convolutions of a network in a launch
constexpr int kMaxConvs = 8;     // convolutions of a launch, over all its networks
constexpr int kMaxNetworks = 4;  // networks of a launch

/// A block's tile: `warps_k` teams of warps_m x warps_n warps each contract a share of K; a warp accumulates
/// m_tiles x n_tiles fragments of 16 x 16. A team has a circular buffer of `stages`.
///
/// A stage is a chunk of K of the tile's rows; or, where `taps` > 1, the input pixels under a row of the filter's taps: the
/// taps' rows of A overlap, pixel m + s is row m of tap s, so that a pixel is loaded once and not `taps` times. It serves
/// filters of that width which leave the image's size as it is.
///
/// `wgmma`: Hopper's form. The warps of a team are warpgroups, which take B from shared memory, and a bulk copy brings the
/// weights of a chunk. `im2col`: they take A from there, too, where TMA brings the pixels of a tap
/// (kernels/cuda/conv2d/im2col.cuh); it serves rows of channels that are whole chunks.
struct Tiling {
  int warps_m, warps_n, warps_k, m_tiles, n_tiles, stages;
  int taps = 1;
  bool wgmma = false, im2col = false;
  DPA_HOST_DEVICE constexpr int rows() const { return warps_m * m_tiles * 16; }
  DPA_HOST_DEVICE constexpr int columns() const { return warps_n * n_tiles * 16; }
  DPA_HOST_DEVICE constexpr int threads() const { return kThreads + (im2col && blocks() == 1 ? 128 : 0); }
  DPA_HOST_DEVICE constexpr int team() const { return warps_m * warps_n * 32; }
  DPA_HOST_DEVICE constexpr int pixels() const { return rows() + taps - 1; }
  DPA_HOST_DEVICE constexpr int input_bytes() const { return pixels() * kChunkBytes; }
  DPA_HOST_DEVICE constexpr int weight_bytes() const { return columns() * kChunkBytes; }  // of a chunk
  DPA_HOST_DEVICE constexpr int stage_bytes() const { return input_bytes() + taps * weight_bytes(); }
  // Blocks of a multiprocessor that registers allow, and, by im2col, the stages.
  DPA_HOST_DEVICE constexpr int blocks() const {
    if (im2col) return stages > 3 ? 1 : 2;
    return m_tiles * n_tiles > 4 || (wgmma && warps_k > 1) ? 1 : 2;
  }
  DPA_HOST_DEVICE constexpr int pitch() const { return columns() + 8; }  // floats of a row of sums: no bank conflicts
  DPA_HOST_DEVICE constexpr int ring_bytes() const {
    const int buffers = warps_k * stages * stage_bytes(), sums = warps_k * rows() * pitch() * 4;
    return buffers > sums ? buffers : sums;
  }
};
/// Circular buffers of the forms for every GPU since 8.0 are at most 96 KiB: with their parameters they fit into the 99 KiB
/// that a block of any of them has, and twice on a data centre's.
constexpr Tiling kTilings[] = {
    {4, 2, 1, 2, 2, 4},                 // 0: 128 x 64
    {2, 2, 2, 2, 2, 3},                 // 1: 64 x 64
    {2, 2, 2, 2, 1, 4},                 // 2: 64 x 32
    {1, 2, 4, 2, 1, 3},                 // 3: 32 x 32
    {2, 1, 4, 1, 1, 4},                 // 4: 32 x 16
    {1, 1, 8, 1, 1, 3},                 // 5: 16 x 16
    {4, 2, 1, 2, 2, 2, 3},              // 6: 128 x 64, 3 taps a stage
    {8, 1, 1, 1, 4, 4, 1, true},        // 7: 128 x 64 by warpgroups
    {8, 1, 1, 1, 4, 2, 3, true},        // 8: the same, 3 taps a stage
    {4, 1, 2, 1, 4, 3, 3, true},        // 9: 64 x 64, 3 taps a stage, a warpgroup a team
    {8, 1, 1, 1, 8, 3, 1, true, true},  // 10: 128 x 128 by im2col, two blocks a multiprocessor
    {8, 1, 1, 1, 8, 6, 1, true, true},  // 11: the same, one
    {8, 1, 1, 2, 4, 2, 1, true, true},  // 12: 256 x 64 by im2col
};
constexpr int kNumTilings = sizeof(kTilings) / sizeof(kTilings[0]);

/// Beside the circular buffer: bias, scale, shift and group of each column; moments and factors of each pair; barriers of
/// the stages.
constexpr int kMaxBarriers = 16;
DPA_HOST_DEVICE constexpr int parameter_bytes(const Tiling& t) {
  const int bytes = t.columns() * 16 + kMaxPairs * 24 + kMaxBarriers * 8;
  return t.im2col ? (bytes + 1023) / 1024 * 1024 : bytes;  // boxes are swizzled over 1024 bytes
}
constexpr int shared_bytes(const Tiling& t) { return parameter_bytes(t) + t.ring_bytes(); }

struct Shape {
  DType dtype;  // kFloat32 (multiplied in TF32), kFloat16 or kBFloat16
  int batch, height, width, channels;
  int out_height, out_width, out_channels;
  int kernel_height, kernel_width, stride, pad_top, pad_left;
  int groups = 0;  // of a GroupNorm behind it; 0 for none
};
/// The output's sizes for equal padding on both sides.
Shape shape_of(DType dtype, int batch, int height, int width, int channels, int out_channels, int kernel, int stride,
               int padding, int groups = 0);
/// A 7 x 7 filter of stride 2 and padding 3 over 3 channels, as one of 4 x 4 over cells of 2 x 2 pixels (12 channels, in
/// rows of pixels): rows of 3 channels are no pieces, and K is 256 instead of 392.
Shape shape_of_cells(DType dtype, int batch, int height, int width, int out_channels, int groups = 0);

inline int element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
/// Pieces of a row of channels; its channels in memory, the last ones zeros.
inline int pieces_of(DType dtype, int channels) {
  const int per = kPieceBytes / element_size(dtype);
  return (channels + per - 1) / per;
}
inline int padded(DType dtype, int channels) { return pieces_of(dtype, channels) * kPieceBytes / element_size(dtype); }

/// A tile of a first layer with its max pooling (conv2d/stem.cuh).
constexpr int kStemColumns = 64, kStemPooledHeight = 8, kStemPooledWidth = 7;

/// Chunks of K, and bytes of the packed weights: for each chunk, for each 8 columns, core matrices (pack.cuh).
int chunks_of(const Shape& s);
inline size_t weight_bytes(const Shape& s) {
  return static_cast<size_t>((s.out_channels + 15) / 16) * chunks_of(s) * 2048;
}

/// Whether a tiling's stages are parts of this convolution's K.
bool serves(const Tiling& t, const Shape& s);
/// Stages of K.
int stages_of(const Tiling& t, const Shape& s);

struct ConvPlan {
  int tiling = 0, splits = 1;
  // A row tile is `samples` whole samples, or, where that is 0, one of `tiles_per_sample` parts of a sample. Without a
  // GroupNorm all rows count as one sample of `sample_rows`.
  int samples = 0, tiles_per_sample = 1, sample_rows = 1;
  int row_tiles = 1, column_tiles = 1;
  int chunks = 1, stages = 1;  // of K
  // GroupNorm: the most column tiles that a group lies in; moments that a tile has of each pair, and of all; whether tiles
  // exchange them.
  int span = 1, sub = 1, moments = 1;
  bool exchange = false;
  int blocks() const { return row_tiles * column_tiles * splits; }
  int parts() const { return tiles_per_sample * span * sub; }
  /// Whether blocks wait for one another, for which all must be resident.
  bool waits(bool deferred) const { return splits > 1 || (exchange && !deferred); }
  size_t partial_words() const {
    return splits == 1 ? 0 : static_cast<size_t>(blocks()) * kTilings[tiling].rows() * kTilings[tiling].columns();
  }
  size_t moment_words(const Shape& s) const {
    return exchange ? static_cast<size_t>(s.batch) * s.groups * parts() * 4 : 0;
  }
};

struct Device {
  int multiprocessors = 132;
  int shared = 227 << 10;        // of a multiprocessor
  int blocks_per_processor = 2;  // most, by registers
  bool wgmma = false;            // whether the kernels' forms by warpgroups run here (`has_wgmma`)
};
/// Blocks that are resident at once.
int resident_blocks(int tiling, const Device& device);

/// The plan with this tiling and as many splits; false where it does not serve (too many pairs in a tile).
bool make_plan(const Shape& s, int tiling, int splits, ConvPlan& plan);
/// The plan that a model of its clocks prefers. With a GroupNorm its grid is resident, where any is; else `deferred` is
/// set, and a second pass normalises.
struct Choice {
  ConvPlan plan;
  bool deferred = false;
  double clocks = 0;
};
/// `networks`: how many of such convolutions are in the launch.
Choice choose(const Shape& s, const Device& device, int networks = 1);
/// All plans worth a measurement, the preferred one first.
std::vector<Choice> candidates(const Shape& s, const Device& device, int networks = 1);
double clocks_of(const Shape& s, const ConvPlan& plan, const Device& device, int networks = 1);

/// Shared memory of a block of the stem, and whether it serves a first layer (`shape_of_cells`) on this device.
int stem_bytes(DType dtype);
bool serves_stem(const Shape& s, const Device& device);
/// Its blocks for each network.
int stem_blocks(const Shape& s, const Device& device, int networks);

}  // namespace dpa::kernels::conv2d
