// The GEMM of a tile: what a block loads.
#pragma once
#include <type_traits>

#include "kernels/cuda/conv2d/conv2d.h"
#include "kernels/cuda/conv2d/device.cuh"

namespace dpa::kernels::conv2d::device {

// Which part of which convolution a block computes.
struct Tile {
  int split, column, row;     // indices: of K, of the columns, of the rows
  int first_row, rows;        // (n, p, q) of the first row; rows
  int first_sample, samples;  // of the GroupNorm
};
template <class C>
DPA_DEVICE Tile tile_at(const Conv& v, int index) {
  constexpr Tiling t = C::kTiling;
  Tile at;
  at.split = index % v.splits, index /= v.splits;
  at.column = index % v.column_tiles, at.row = index / v.column_tiles;
  if (v.samples) {
    at.first_sample = at.row * v.samples, at.first_row = at.first_sample * v.sample_rows;
    at.rows = min(v.samples * v.sample_rows, v.batch_rows - at.first_row);
    at.samples = at.rows / v.sample_rows;
  } else {
    const int part = at.row % v.tiles_per_sample * t.rows();
    at.first_sample = at.row / v.tiles_per_sample, at.samples = 1;
    at.first_row = at.first_sample * v.sample_rows + part;
    at.rows = min(t.rows(), v.sample_rows - part);
  }
  return at;
}

// Which convolution of a launch a block's index belongs to.
DPA_DEVICE int conv_at(const Conv* convs, int count, int index) {
  int which = 0;
  while (which + 1 < count && index >= convs[which + 1].first_block) which++;
  return which;
}

// Of a tile, in shared memory, in front of the circular buffers.
template <class C>
struct Parameters {
  static constexpr int kColumns = C::kTiling.columns();
  float bias[kColumns], scale[kColumns], shift[kColumns];
  int group[kColumns];  // of the tile's groups
  union {
    float4 moments[kMaxPairs];  // (count, mean, sum of squared deviations), by pair and part of the tile
    uint4 zeros[kChunkPieces];  // before the moments are taken: a row of A that is not in the image
  };
  float2 factors[kMaxPairs];  // mean and 1 / standard deviation
  uint64_t barriers[kMaxBarriers];
  DPA_DEVICE static Parameters& at() { return *reinterpret_cast<Parameters*>(shared()); }
};

// Which taps of the output (p, q) lie in the image. Bit r: row r of the filter does; bit 16 + s: its column s.
DPA_DEVICE uint32_t taps_inside(const Conv& v, int p, int q) {
  const int y = p * v.stride - v.pad_top, left = q * v.stride - v.pad_left;
  const int low_y = max(0, -y), high_y = min(v.kernel_height, v.height - y);
  const int low_x = max(0, -left), high_x = min(v.kernel_width, v.width - left);
  if (high_y <= low_y || high_x <= low_x) return 0;
  return ((1u << high_y) - (1u << low_y)) | ((1u << high_x) - (1u << low_x)) << 16;
}
DPA_DEVICE uint32_t tap_bits(int r, int s) { return 1u << r | 1u << (16 + s); }

// Tells the warpgroups that a stage's weights are there (`wgmma`). Its phases outlive a tile: one object a block.
template <class C>
struct Barriers {
  static constexpr Tiling t = C::kTiling;
  static_assert(!t.wgmma || t.warps_k * t.stages <= kMaxBarriers);
  uint32_t phases = 0;
  DPA_DEVICE static uint32_t of(int slot) {
    return shared_address(Parameters<C>::at().barriers + thread() / t.team() * t.stages + slot);
  }
  // Every thread, before any of the team waits: a barrier of the team lies between.
  DPA_DEVICE Barriers() {
    if (t.wgmma && thread() % t.team() == 0) {
#pragma unroll
      for (int slot = 0; slot < t.stages; slot++) barrier_init(of(slot), 1);
      barrier_init_fence();
    }
  }
  DPA_DEVICE void wait(int slot) {
    barrier_wait(of(slot), phases >> slot & 1);
    phases ^= 1u << slot;
  }
};

// Loads the weights of a team's stages: of the tile's columns, chunks of K that lie `step` chunks apart, one for each tap.
template <class C>
struct WeightLoader {
  static constexpr Tiling t = C::kTiling;
  static constexpr int kTeam = t.team(), kCopies = t.weight_bytes() / 16 / kTeam;
  static_assert(kCopies >= 1, "every thread of a team loads as much");
  const uint8_t* from;      // chunk 0 of the tile's columns
  uint32_t chunk, present;  // bytes of all columns of a chunk; of the tile's columns that there are
  DPA_DEVICE WeightLoader(const Conv& v, const Tile& at) {
    const int groups = (v.out_channels + 15) / 16 * 2, first = at.column * t.columns() / 8;
    chunk = groups * 1024;
    present = min(t.columns() / 8, groups - first) * 1024;
    from = static_cast<const uint8_t*>(v.weights) + first * 1024;
  }
  // Columns that are not there keep what was in memory.
  DPA_DEVICE void load(uint32_t to, int slot, int first, int step) const {
    const int mine = thread() % kTeam;
    if constexpr (t.wgmma) {
      if (mine != 0) return;
      const uint32_t barrier = Barriers<C>::of(slot);
      barrier_expect(barrier, t.taps * present);
#pragma unroll
      for (int s = 0; s < t.taps; s++)
        copy_bulk(to + s * t.weight_bytes(), from + int64_t{first + s * step} * chunk, present, barrier);
    } else {
#pragma unroll
      for (int s = 0; s < t.taps; s++)
#pragma unroll
        for (int k = 0; k < kCopies; k++) {
          const uint32_t offset = (mine + k * kTeam) * 16;
          if (offset < present)
            copy_async_line_16(to + s * t.weight_bytes() + offset, from + int64_t{first + s * step} * chunk + offset);
        }
    }
  }
};

// The stages of a team: how many, and which ones are next.
template <class C>
struct Stages {
  static constexpr Tiling t = C::kTiling;
  static constexpr uint32_t kStage = t.stage_bytes();
  int begin, count, weights_left, input_left;
  uint32_t at;  // the team's circular buffer
  int weights_slot = 0, input_slot = 0;
  DPA_DEVICE Stages(const Conv& v, const Tile& tile, uint32_t buffers) {
    const int team = thread() / t.team(), parts = v.splits * t.warps_k, part = tile.split * t.warps_k + team;
    begin = v.stages * part / parts;
    count = weights_left = input_left = v.stages * (part + 1) / parts - begin;
    at = buffers + team * t.stages * kStage;
  }
  DPA_DEVICE static int after(int slot) { return slot + 1 == t.stages ? 0 : slot + 1; }
  DPA_DEVICE uint32_t address(int slot) const { return at + slot * kStage; }
};

// Loads the chunks of a team (`taps` 1): each thread one piece of 16 bytes of every kStep-th row of A, and the weights.
// The pieces of A's row lie at XOR-permuted places, so that neither copies nor ldmatrix meet bank conflicts.
template <class C>
struct Loader : Stages<C> {
  static constexpr Tiling t = C::kTiling;
  static constexpr int kTeam = t.team(), kStep = kTeam / kChunkPieces, kRows = t.rows() / kStep;
  static_assert(kRows * kStep == t.rows(), "every thread of a team loads as much");

  const WeightLoader<C> weights;
  const uint8_t* x;
  int width, pieces, kernel_width;
  int next_chunk;  // of the weights
  int piece, kh, kw;
  int offset[kRows];      // pieces from x to where the filter begins
  uint32_t valid[kRows];  // taps_inside

  DPA_DEVICE Loader(const Conv& v, const Tile& at, uint32_t buffers)
      : Stages<C>(v, at, buffers),
        weights(v, at),
        x(static_cast<const uint8_t*>(v.x)),
        width(v.width),
        pieces(v.pieces),
        kernel_width(v.kernel_width) {
    const int mine = thread() % kTeam, all = this->begin * kChunkPieces + mine % kChunkPieces, tap = all / pieces;
    next_chunk = this->begin;
    piece = all - tap * pieces, kh = tap / kernel_width, kw = tap - kh * kernel_width;
    const int in_image = v.out_height * v.out_width;
    int row = mine / kChunkPieces;
    int n = (at.first_row + row) / in_image, rest = at.first_row + row - n * in_image;
    int p = rest / v.out_width, q = rest - p * v.out_width;
#pragma unroll
    for (int i = 0; i < kRows; i++, row += kStep) {
      const int y = p * v.stride - v.pad_top, left = q * v.stride - v.pad_left;
      offset[i] = ((n * v.height + y) * width + left) * pieces;
      valid[i] = row < at.rows ? taps_inside(v, p, q) : 0;
      q += kStep;
#pragma unroll 1
      while (q >= v.out_width) {
        q -= v.out_width;
        if (++p == v.out_height) p = 0, n++;
      }
    }
  }

  // The next chunk of B. Weights wait for nobody.
  DPA_DEVICE void load_weights() {
    if (this->weights_left-- <= 0) return;
    weights.load(this->address(this->weights_slot) + t.input_bytes(), this->weights_slot, next_chunk++, 0);
    this->weights_slot = this->after(this->weights_slot);
  }
  // The next chunk of A.
  DPA_DEVICE void load_input() {
    if (this->input_left-- <= 0) return;
    const int tap = (kh * width + kw) * pieces + piece, row = thread() % kTeam / kChunkPieces,
              place = thread() % kChunkPieces;
    const uint32_t wanted = tap_bits(min(kh, kMaxKernel), kw), to = this->address(this->input_slot) + row * kChunkBytes;
#pragma unroll
    for (int k = 0; k < kRows; k++)
      copy_async_16_if(to + k * kStep * kChunkBytes + ((place ^ ((row + k * kStep) & 7)) << 4),
                       x + int64_t{offset[k] + tap} * kPieceBytes, (valid[k] & wanted) == wanted);
    piece += kChunkPieces;
#pragma unroll 1
    while (piece >= pieces) {
      piece -= pieces;
      if (++kw == kernel_width) kw = 0, kh++;
    }
    this->input_slot = this->after(this->input_slot);
  }
};

// Loads the stages of a team where taps share pixels: stage (r, slab) holds the slab's pieces of the pixels under filter row
// r, from the first row's leftmost tap on, and the weights of that row's taps. An output and the input under its middle tap have
// the same index, so the pixels of a tile are neighbours, whatever the image's width; rows of other taps, which lie beyond an
// edge, are loaded and not used. Pieces are permuted, so that neither copies nor ldmatrix meet bank conflicts.
template <class C>
struct PixelLoader : Stages<C> {
  static constexpr Tiling t = C::kTiling;
  static constexpr int kTeam = t.team(), kStep = kTeam / kChunkPieces, kCopies = (t.pixels() + kStep - 1) / kStep;

  const WeightLoader<C> weights;
  const uint8_t* x;                                 // of this thread's piece of the first slab
  int slabs, weights_slab, weights_row, slab, row;  // of the next stages
  int first, pixels, width, pieces;  // the pixel of this thread's first copy under filter row 0; pixels of all images

  DPA_DEVICE PixelLoader(const Conv& v, const Tile& at, uint32_t buffers)
      : Stages<C>(v, at, buffers), weights(v, at), width(v.width), pieces(v.pieces) {
    const int mine = thread() % kTeam;
    slabs = pieces / kChunkPieces;
    row = weights_row = this->begin / slabs, slab = weights_slab = this->begin - row * slabs;
    x = static_cast<const uint8_t*>(v.x) + mine % kChunkPieces * kPieceBytes;
    first = at.first_row + mine / kChunkPieces - v.pad_top * width - v.pad_left, pixels = v.batch_rows;
  }
  // Where a piece of a pixel lies.
  DPA_DEVICE static int place(int pixel, int piece) { return piece ^ (pixel & 7); }

  DPA_DEVICE void load_weights() {
    if (this->weights_left-- <= 0) return;
    weights.load(this->address(this->weights_slot) + t.input_bytes(), this->weights_slot,
                 weights_row * t.taps * slabs + weights_slab, slabs);
    if (++weights_slab == slabs) weights_slab = 0, weights_row++;
    this->weights_slot = this->after(this->weights_slot);
  }
  DPA_DEVICE void load_input() {
    if (this->input_left-- <= 0) return;
    const int mine = thread() % kTeam, pixel = mine / kChunkPieces, at = first + row * width;
    const uint32_t to =
        this->address(this->input_slot) + (pixel * kChunkPieces + place(pixel, mine % kChunkPieces)) * kPieceBytes;
    const uint8_t* from = x + slab * kChunkBytes;
#pragma unroll
    for (int k = 0; k < kCopies; k++)
      if ((k + 1) * kStep <= t.pixels() || pixel + k * kStep < t.pixels()) {
        const int index = at + k * kStep;
        copy_async_16_if(to + k * kTeam * 16, from + int64_t{index} * pieces * kPieceBytes,
                         static_cast<uint32_t>(index) < static_cast<uint32_t>(pixels));
      }
    if (++slab == slabs) slab = 0, row++;
    this->input_slot = this->after(this->input_slot);
  }
};
template <class C>
using LoaderOf = std::conditional_t<C::kTiling.taps == 1, Loader<C>, PixelLoader<C>>;

}  // namespace dpa::kernels::conv2d::device
