// The GEMM of a tile: what a block loads and multiplies.
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

// Loads the chunks of a team (`taps` 1): each thread one piece of 16 bytes of every kStep-th row of A, and a share of B.
// The pieces of A's row lie at XOR-permuted places, so that neither copies nor ldmatrix meet bank conflicts.
template <class C>
struct Loader {
  static constexpr Tiling t = C::kTiling;
  static constexpr int kTeam = t.team(), kStep = kTeam / kChunkPieces, kRows = t.rows() / kStep;
  static constexpr int kABytes = t.rows() * kChunkBytes, kWeights = t.columns() * kChunkPieces / kTeam;
  static constexpr uint32_t kStage = t.stage_bytes(), kRing = t.stages * kStage;
  static_assert(kRows * kStep == t.rows() && kWeights >= 1, "every thread of a team loads as much");
  static_assert(kTeam == 256 || 128 % kTeam == 0, "a share of B lies in one fragment's columns");

  const uint8_t *x, *weights;  // weights: of this thread's share of the next chunk
  int width, pieces, kernel_width, column_bytes;
  int count, weights_left, input_left;       // chunks of K
  uint32_t stages_at, weights_at, input_at;  // of the team; offsets of the next stages
  int piece, kh, kw, column_tiles;
  int offset[kRows];      // pieces from x to where the filter begins
  uint32_t valid[kRows];  // taps_inside

  DPA_DEVICE Loader(const Conv& v, const Tile& at, uint32_t buffers)
      : x(static_cast<const uint8_t*>(v.x)), width(v.width), pieces(v.pieces), kernel_width(v.kernel_width) {
    const int team = thread() / kTeam, parts = v.splits * t.warps_k, part = at.split * t.warps_k + team;
    const int mine = thread() % kTeam, begin = v.chunks * part / parts;
    count = weights_left = input_left = v.chunks * (part + 1) / parts - begin;
    stages_at = buffers + team * kRing, weights_at = input_at = 0;
    const int first_column = at.column * (t.columns() / 16) + mine / 128;
    column_tiles = (v.out_channels + 15) / 16 - first_column;
    column_bytes = v.chunks * 2048;
    weights =
        static_cast<const uint8_t*>(v.weights) + int64_t{first_column} * column_bytes + begin * 2048 + mine % 128 * 16;
    const int all = begin * kChunkPieces + mine % kChunkPieces, tap = all / pieces;
    piece = all - tap * pieces, kh = tap / kernel_width, kw = tap - kh * kernel_width;
    const int pixels = v.out_height * v.out_width;
    int row = mine / kChunkPieces;
    int n = (at.first_row + row) / pixels, rest = at.first_row + row - n * pixels;
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
  DPA_DEVICE static uint32_t after(uint32_t stage) { return stage + kStage == kRing ? 0 : stage + kStage; }

  // The next chunk of B. Weights wait for nobody. Columns that are not there keep what was in memory.
  DPA_DEVICE void load_weights() {
    if (weights_left-- <= 0) return;
    const uint32_t to = stages_at + weights_at + kABytes + thread() % kTeam * 16;
#pragma unroll
    for (int k = 0; k < kWeights; k++) {
      const int column = k * kTeam / 128;
      if (column < column_tiles) copy_16(to + k * kTeam * 16, weights + column * column_bytes + k * kTeam % 128 * 16);
    }
    weights += 2048, weights_at = after(weights_at);
  }
  // The next chunk of A.
  DPA_DEVICE void load_input() {
    if (input_left-- <= 0) return;
    const int tap = (kh * width + kw) * pieces + piece, row = thread() % kTeam / kChunkPieces,
              place = thread() % kChunkPieces;
    const uint32_t wanted = tap_bits(min(kh, kMaxKernel), kw), to = stages_at + input_at + row * kChunkBytes;
#pragma unroll
    for (int k = 0; k < kRows; k++)
      copy_16_or_zeros(to + k * kStep * kChunkBytes + ((place ^ ((row + k * kStep) & 7)) << 4),
                       x + int64_t{offset[k] + tap} * kPieceBytes, (valid[k] & wanted) == wanted);
    piece += kChunkPieces;
#pragma unroll 1
    while (piece >= pieces) {
      piece -= pieces;
      if (++kw == kernel_width) kw = 0, kh++;
    }
    input_at = after(input_at);
  }
};

// Loads the stages of a team where taps share pixels: stage (r, slab) holds the slab's pieces of the pixels under filter row
// r, from the first row's leftmost tap on, and the weights of that row's taps. An output and the input under its middle tap have
// the same index, so the pixels of a tile are neighbours, whatever the image's width; rows of other taps, which lie beyond an
// edge, are loaded and not used. Pieces are permuted, so that neither copies nor ldmatrix meet bank conflicts.
template <class C>
struct PixelLoader {
  static constexpr Tiling t = C::kTiling;
  static constexpr int kTeam = t.team(), kStep = kTeam / t.pixel, kCopies = (t.pixels() + kStep - 1) / kStep;
  static constexpr int kChunkCopies = t.columns() * kChunkPieces / kTeam, kWeights = t.chunks() * kChunkCopies;
  static constexpr uint32_t kStage = t.stage_bytes(), kRing = t.stages * kStage;
  static_assert(kTeam % 128 == 0 && kChunkCopies >= 1, "a team loads whole columns of a chunk");

  const uint8_t *x, *weights;           // of this thread's piece of the first slab; of its share of the first chunk
  int count, weights_left, input_left;  // stages
  uint32_t stages_at, weights_at, input_at;         // of the team; offsets of the next stages
  int slabs, weights_slab, weights_row, slab, row;  // of the next stages
  int column_tiles, column_bytes;
  int first, pixels, width, pieces;  // the pixel of this thread's first copy under filter row 0; pixels of the image

  DPA_DEVICE PixelLoader(const Conv& v, const Tile& at, uint32_t buffers) : width(v.width), pieces(v.pieces) {
    const int team = thread() / kTeam, parts = v.splits * t.warps_k, part = at.split * t.warps_k + team;
    const int mine = thread() % kTeam, begin = v.stages * part / parts;
    count = weights_left = input_left = v.stages * (part + 1) / parts - begin;
    stages_at = buffers + team * kRing, weights_at = input_at = 0;
    slabs = pieces / t.pixel;
    row = weights_row = begin / slabs, slab = weights_slab = begin - row * slabs;
    const int first_column = at.column * (t.columns() / 16) + mine / 128;
    column_tiles = (v.out_channels + 15) / 16 - first_column, column_bytes = v.chunks * 2048;
    weights = static_cast<const uint8_t*>(v.weights) + int64_t{first_column} * column_bytes + mine % 128 * 16;
    x = static_cast<const uint8_t*>(v.x) + mine % t.pixel * kPieceBytes;
    first = at.first_row + mine / t.pixel - v.pad_top * width - v.pad_left, pixels = v.batch_rows;
  }
  DPA_DEVICE static uint32_t after(uint32_t stage) { return stage + kStage == kRing ? 0 : stage + kStage; }
  // Where a piece of a pixel lies.
  DPA_DEVICE static int place(int pixel, int piece) { return piece ^ (t.pixel == 8 ? pixel & 7 : pixel >> 2 & 1); }

  DPA_DEVICE void load_weights() {
    if (weights_left-- <= 0) return;
    const uint32_t to = stages_at + weights_at + t.input_bytes() + thread() % kTeam * 16;
    const uint8_t* from = weights + (weights_row * t.chunks() * slabs + weights_slab) * 2048;
#pragma unroll
    for (int k = 0; k < kWeights; k++) {
      const int chunk = k / kChunkCopies, column = k % kChunkCopies * kTeam / 128;
      if (column < column_tiles) copy_16(to + k * kTeam * 16, from + chunk * slabs * 2048 + column * column_bytes);
    }
    if (++weights_slab == slabs) weights_slab = 0, weights_row++;
    weights_at = after(weights_at);
  }
  DPA_DEVICE void load_input() {
    if (input_left-- <= 0) return;
    const int mine = thread() % kTeam, pixel = mine / t.pixel, at = first + row * width;
    const uint32_t to = stages_at + input_at + (pixel * t.pixel + place(pixel, mine % t.pixel)) * kPieceBytes;
    const uint8_t* from = x + slab * t.pixel * kPieceBytes;
#pragma unroll
    for (int k = 0; k < kCopies; k++)
      if ((k + 1) * kStep <= t.pixels() || pixel + k * kStep < t.pixels()) {
        const int index = at + k * kStep;
        copy_16_or_zeros(to + k * kTeam * 16, from + int64_t{index} * pieces * kPieceBytes,
                         static_cast<uint32_t>(index) < static_cast<uint32_t>(pixels));
      }
    if (++slab == slabs) slab = 0, row++;
    input_at = after(input_at);
  }
};
template <class C>
using LoaderOf = std::conditional_t<C::kTiling.taps == 1, Loader<C>, PixelLoader<C>>;

// What is shared by the threads of a team must be complete, or read, before anyone goes on.
template <class C>
DPA_DEVICE void sync_team() {
  constexpr Tiling t = C::kTiling;
  if constexpr (t.team() == kThreads)
    sync_block();
  else if constexpr (t.team() == 32)
    sync_warp();
  else
    sync_named(1 + thread() / t.team(), t.team());
}

template <class C>
using Accumulators = float[C::kTiling.m_tiles][2 * C::kTiling.n_tiles][4];

// The fragments of a step, 32 bytes of K: A by ldmatrix, B as it was packed.
template <class C, class T>
struct Fragments {
  static constexpr Tiling t = C::kTiling;
  uint4 a[t.m_tiles], b[t.n_tiles];
  // `rows`: where this lane's rows lie; `flip`: of the pieces of this step, which are permuted.
  DPA_DEVICE void load(const uint32_t (&rows)[t.m_tiles], uint32_t flip, uint32_t b_at) {
#pragma unroll
    for (int i = 0; i < t.m_tiles; i++) {
      uint32_t words[4];
      load_matrices(words, rows[i] ^ flip);
      a[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
#pragma unroll
    for (int j = 0; j < t.n_tiles; j++) b[j] = load_shared_16(b_at + j * 2048);
  }
  DPA_DEVICE void multiply(Accumulators<C>& sum) {
#pragma unroll
    for (int i = 0; i < t.m_tiles; i++) {
      if constexpr (T::kElements == 4) {
        a[i].x = to_tf32(as_float(a[i].x)), a[i].y = to_tf32(as_float(a[i].y));
        a[i].z = to_tf32(as_float(a[i].z)), a[i].w = to_tf32(as_float(a[i].w));
      }
#pragma unroll
      for (int j = 0; j < t.n_tiles; j++) {
        mma(typename T::Math{}, sum[i][2 * j], a[i], b[j].x, b[j].y);
        mma(typename T::Math{}, sum[i][2 * j + 1], a[i], b[j].z, b[j].w);
      }
    }
  }
};

// A lane's rows of A in the stages of a loader.
template <class C>
struct ChunkRows {
  static constexpr Tiling t = C::kTiling;
  static constexpr int kSteps = 4;  // of a stage
  uint32_t first;
  DPA_DEVICE ChunkRows(const Conv&, const Tile&, const Loader<C>&) {
    const int lane = thread() & 31, warp = thread() % t.team() / 32;
    first = (warp / t.warps_n * t.m_tiles * 16 + (lane & 15)) * kChunkBytes + ((lane >> 4 ^ (lane & 7)) << 4);
  }
  DPA_DEVICE void find(uint32_t (&rows)[t.m_tiles], uint32_t stage, int step) const {
#pragma unroll
    for (int i = 0; i < t.m_tiles; i++) rows[i] = stage + first + i * 16 * kChunkBytes;
  }
  DPA_DEVICE static uint32_t flip(int step) { return step << 5; }
  DPA_DEVICE void next() {}
};
// Pixels: row m of tap s is pixel m + s, or zeros where that tap is beyond an edge.
template <class C>
struct PixelRows {
  static constexpr Tiling t = C::kTiling;
  static constexpr int kTapSteps = t.pixel / 2, kSteps = t.taps * kTapSteps;
  uint32_t inside[t.m_tiles], zeros;
  int pixel, slabs, slab, row;
  DPA_DEVICE PixelRows(const Conv& v, const Tile& at, const PixelLoader<C>& loader)
      : slabs(loader.slabs), slab(loader.slab), row(loader.row) {
    const int lane = thread() & 31, warp = thread() % t.team() / 32, pixels = v.out_height * v.out_width;
    pixel = warp / t.warps_n * t.m_tiles * 16 + (lane & 15);
#pragma unroll
    for (int i = 0; i < t.m_tiles; i++) {
      const int m = pixel + i * 16, rest = (at.first_row + m) % pixels, p = rest / v.out_width;
      inside[i] = m < at.rows ? taps_inside(v, p, rest - p * v.out_width) : 0;
    }
    zeros = shared_address(Parameters<C>::at().zeros);
  }
  DPA_DEVICE void find(uint32_t (&rows)[t.m_tiles], uint32_t stage, int step) const {
    const int s = step / kTapSteps, lane = thread() & 31;
    const uint32_t wanted = tap_bits(row, s);
    const uint32_t first = stage + ((pixel + s) * t.pixel + PixelLoader<C>::place(pixel + s, lane >> 4)) * kPieceBytes;
#pragma unroll
    for (int i = 0; i < t.m_tiles; i++)
      rows[i] = (inside[i] & wanted) == wanted ? first + i * 16 * t.pixel * kPieceBytes : zeros;
  }
  DPA_DEVICE static uint32_t flip(int step) { return step % kTapSteps << 5; }
  DPA_DEVICE void next() {
    if (++slab == slabs) slab = 0, row++;
  }
};
template <class C>
using RowsOf = std::conditional_t<C::kTiling.taps == 1, ChunkRows<C>, PixelRows<C>>;

// The next step's fragments are loaded before a step is multiplied.
template <class C, class T>
DPA_DEVICE void multiply_stage(const RowsOf<C>& lanes, uint32_t stage, Accumulators<C>& sum) {
  constexpr Tiling t = C::kTiling;
  constexpr int kSteps = RowsOf<C>::kSteps;
  const int lane = thread() & 31, column = thread() % t.team() / 32 % t.warps_n;
  const uint32_t b_at = stage + t.input_bytes() + column * t.n_tiles * 2048 + lane * 16;
  Fragments<C, T> fragments[2];
  uint32_t rows[t.m_tiles];
  const auto load = [&](int step) {
    if (step == 0 || RowsOf<C>::flip(step) == 0) lanes.find(rows, stage, step);
    fragments[step % 2].load(rows, RowsOf<C>::flip(step), b_at + step / 4 * t.columns() * kChunkBytes + step % 4 * 512);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
    if (step + 1 < kSteps) load(step + 1);
    fragments[step % 2].multiply(sum);
  }
}

// Weights of the first stages, before the dependency is awaited.
template <class L>
DPA_DEVICE void prefetch_weights(L& loader) {
#pragma unroll 1
  for (int i = 0; i < L::t.stages - 1; i++) loader.load_weights();
}
template <class C, class T>
DPA_DEVICE void contract(LoaderOf<C>& loader, RowsOf<C> lanes, Accumulators<C>& sum) {
  constexpr int kStages = C::kTiling.stages;
#pragma unroll 1
  for (int i = 0; i < kStages - 1; i++) {
    loader.load_input();
    copies_commit();
  }
  uint32_t stage = 0;
#pragma unroll 1
  for (int left = loader.count; left > 0; left--) {
    copies_wait<kStages - 2>();
    sync_team<C>();
    loader.load_weights(), loader.load_input();
    copies_commit();
    multiply_stage<C, T>(lanes, loader.stages_at + stage, sum);
    lanes.next(), stage = loader.after(stage);
  }
  copies_wait<0>();
}

}  // namespace dpa::kernels::conv2d::device
