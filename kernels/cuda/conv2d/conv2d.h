// Image encoders: 2-D convolutions on channels-last images with what follows them, pooling, preprocessing.
//
// Tensors are (batch, height, width, channels), rows of channels padded with zeros to whole pieces of 16 bytes, in
// float32, float16 or bfloat16. Accumulators, statistics and parameters are float32; sums are taken in an order that the plan alone
// determines, so results repeat bit for bit.
#pragma once
#include <cstdint>

#include "kernels/plans/conv2d/plan.h"

namespace dpa::kernels::conv2d {

/// A convolution of a launch:
///   v = conv(x, weights) + bias;  v = group_norm(v) (groups > 0);  v = v scale + shift;  v += residual;  relu
/// Null pointers leave out what they stand for.
struct Conv {
  const void *x, *weights, *residual;
  void* out;
  const float *bias, *scale, *shift;
  // Messages, zeros before the first launch (epoch below): partial sums of the splits, moments of the tiles.
  uint32_t *partials, *moments;
  int height, width, pieces, kernel_height, kernel_width, stride, pad_top, pad_left;
  int out_height, out_width, out_channels, out_pieces;
  int batch_rows, sample_rows, samples, tiles_per_sample, row_tiles, column_tiles, splits, chunks, stages;
  int groups, group_channels, span, sub, sub_bits, exchange, deferred, relu;  // sub: 2^sub_bits
  int tile_columns;
  float eps;
  int first_block, blocks;
};

/// Convolutions that do not depend on each other, in one launch: a block and its shortcut, of one or several networks.
/// All have the same tiling.
struct Launch {
  Conv convs[kMaxConvs];
  int count, blocks;
  bool waits;  // whether blocks wait for one another (`ConvPlan::waits`): the device places all of them or none
  const uint32_t* epoch;  // counts the calls before this one; words of messages carry its parity
};

/// What is not a GEMM. `x` is (batch, height, width, pieces).
///   kMax             out of x's dtype, (batch, out_height, out_width, pieces); padding is not a value
///   kAverage         out (batch, channels) in float32: means over the pixels
///   kSpatialSoftmax  out (batch, channels, 2) in float32: the expected (x, y), from -1 to 1, under softmax(x temperature)
enum class PoolKind { kMax, kAverage, kSpatialSoftmax };
struct Pool {
  const void* x;
  void* out;
  int batch, height, width, channels, pieces;
  int out_height, out_width, kernel, stride, padding;
  float inverse_temperature;
};

struct Pools {
  Pool pools[kMaxNetworks];
  int count;
};
/// What `deferred` convolutions stored, raw, that a max pooling of 3 x 3 normalises on its way; of each pool's network.
struct RawMaps {
  Conv convs[kMaxNetworks];
  const uint32_t* epoch;  // as `Launch`
};

/// A first layer on cells and the max pooling of 3 x 3 and stride 2 behind it (`serves_stem`):
///   out = max_pool(relu((conv(x, weights) + bias) scale + shift))
/// `x` is (batch, height, width) cells, `out` (batch, pooled_height, pooled_width, 64).
struct Stem {
  const void *x, *weights;
  void* out;
  const float *bias, *scale, *shift;
  int height, width, pooled_height, pooled_width;
  int tiles_high, tiles_wide, tiles;
  int relu;
};
struct Stems {
  Stem stems[kMaxNetworks];
  int count;
};

/// out = (crop(resize(image)) - mean) inverse_std, channels last; uint8 is divided by 255. Strides in elements say whether
/// channels are first or last. `cells`: 2 x 2 pixels of 3 channels are 12 channels of one (`Cells` in plan.h).
enum class Pixel : int { kUint8, kFloat32, kBFloat16 };
struct Preprocess {
  const void* image;
  void* out;
  Pixel pixel;
  int batch, height, width, channels;
  int64_t stride_n, stride_c, stride_y, stride_x;
  int resized_height, resized_width, top, left, crop_height, crop_width;
  bool antialias, cells;
  float mean[4], inverse_std[4];
};
/// Messages of the launches that follow begin as zeros: the first launch of a call writes them.
struct Preprocesses {
  Preprocess items[kMaxNetworks];
  int count;
  void* messages;
  int64_t message_pieces;  // of 16 bytes
};

/// Fills what the plan and the shape determine; pointers, eps, relu and first_block are the caller's.
inline Conv conv_of(const Shape& s, const ConvPlan& p, bool deferred = false) {
  Conv c = {};
  c.height = s.height, c.width = s.width, c.pieces = pieces_of(s.dtype, s.channels);
  c.kernel_height = s.kernel_height, c.kernel_width = s.kernel_width, c.stride = s.stride;
  c.pad_top = s.pad_top, c.pad_left = s.pad_left;
  c.out_height = s.out_height, c.out_width = s.out_width, c.out_channels = s.out_channels;
  c.out_pieces = pieces_of(s.dtype, s.out_channels);
  c.batch_rows = s.batch * s.out_height * s.out_width, c.sample_rows = p.sample_rows, c.samples = p.samples;
  c.tiles_per_sample = p.tiles_per_sample, c.row_tiles = p.row_tiles, c.column_tiles = p.column_tiles;
  c.splits = p.splits, c.chunks = p.chunks, c.stages = p.stages;
  c.groups = s.groups, c.group_channels = s.groups ? s.out_channels / s.groups : 1;
  c.span = p.span, c.sub = p.sub, c.exchange = p.exchange, c.deferred = deferred;
  while (1 << c.sub_bits < c.sub) c.sub_bits++;
  c.eps = 1e-5f;
  c.tile_columns = kTilings[p.tiling].columns();
  c.blocks = p.blocks();
  return c;
}

/// Fills the sizes; pointers and relu are the caller's.
inline Stem stem_of(const Shape& s) {
  Stem v = {};
  v.height = s.height, v.width = s.width;
  v.pooled_height = (s.height - 1) / 2 + 1, v.pooled_width = (s.width - 1) / 2 + 1;
  v.tiles_high = (v.pooled_height + kStemPooledHeight - 1) / kStemPooledHeight;
  v.tiles_wide = (v.pooled_width + kStemPooledWidth - 1) / kStemPooledWidth;
  v.tiles = s.batch * v.tiles_high * v.tiles_wide;
  return v;
}

}  // namespace dpa::kernels::conv2d
