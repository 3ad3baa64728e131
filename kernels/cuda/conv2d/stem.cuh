// The first layer of a ResNet without GroupNorm and the max pooling behind it, in one: the convolution's output, four times
// as large as the pooled one, stays in shared memory.
//
// A tile is 8 x 7 pooled pixels: 17 x 15 pixels of the convolution, 255 rows of 64 columns, from 20 x 18 cells of 2 x 2
// pixels of the image. A block takes tiles of one network in turn; it loads the weights once, and the next tile's cells while
// it works on a tile.
#pragma once
#include "kernels/cuda/conv2d/mainloop.cuh"

namespace dpa::kernels::conv2d::device {

DPA_DEVICE float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }

template <class T>
struct StemTile {
  static constexpr int kColumns = kStemColumns, kElement = 16 / T::kElements;  // bytes
  static constexpr int kWide = 2 * kStemPooledWidth + 1, kHigh = 2 * kStemPooledHeight + 1, kRows = kWide * kHigh;
  static constexpr int kCellsWide = kWide + 3, kCells = kCellsWide * (kHigh + 3);
  static constexpr int kPieces = (12 + T::kElements - 1) / T::kElements;  // of a cell
  static constexpr int kSteps = 16 * kPieces / 2, kChunks = kSteps / 4;   // of K
  static constexpr int kWeightBytes = kChunks * kColumns * kChunkBytes, kPlane = kCells * kPieceBytes + 64,
                       kCellBytes = kPieces * kPlane;
  static constexpr int kPitch = kColumns * kElement + 8 * kElement;  // of a row of the convolution's: no bank conflicts
  static_assert(kRows <= 256 && kSteps % 4 == 0, "eight warps take two tiles of 16 rows each");

  float scale[kColumns], shift[kColumns];
  uint64_t barrier, unused[15];
  uint8_t weights[kWeightBytes], cells[2][(kCellBytes + 127) / 128 * 128], made[kRows * kPitch];
  DPA_DEVICE static StemTile& at() { return *reinterpret_cast<StemTile*>(shared()); }

  // Cells lie in planes, one for each piece, so that neighbours meet no bank conflicts and taps are constant offsets.
  DPA_DEVICE static constexpr uint32_t place(int cell, int piece) { return piece * kPlane + cell * kPieceBytes; }
};

// A tile of an image: its number, and where its pooled pixels begin.
struct StemPlace {
  int n, row, column;
  DPA_DEVICE StemPlace(const Stem& v, int tile) {
    column = tile % v.tiles_wide * kStemPooledWidth, tile /= v.tiles_wide;
    row = tile % v.tiles_high * kStemPooledHeight, n = tile / v.tiles_high;
  }
};

template <class T>
DPA_DEVICE void load_cells(const Stem& v, int tile, int buffer) {
  using S = StemTile<T>;
  const StemPlace at(v, tile);
  const uint32_t to = shared_address(S::at().cells[buffer]);
#pragma unroll
  for (int k = 0; k * kThreads < S::kCells * S::kPieces; k++) {
    const int i = k * kThreads + thread(), cell = i / S::kPieces, piece = i - cell * S::kPieces;
    if (cell >= S::kCells) continue;
    const int y = 2 * at.row - 3 + cell / S::kCellsWide, x = 2 * at.column - 3 + cell % S::kCellsWide;
    const bool inside = static_cast<uint32_t>(y) < static_cast<uint32_t>(v.height) &&
                        static_cast<uint32_t>(x) < static_cast<uint32_t>(v.width);
    const int64_t from = (int64_t{at.n * v.height + y} * v.width + x) * S::kPieces + piece;
    copy_async_16_if(to + S::place(cell, piece), static_cast<const uint8_t*>(v.x) + from * kPieceBytes, inside);
  }
}

// A lane's two rows of A: K runs over (r, s, piece) of the 4 x 4 cells under a pixel.
template <class T>
struct StemRows {
  using S = StemTile<T>;
  uint32_t first[2];
  DPA_DEVICE StemRows() {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int m = min((thread() >> 5) * 32 + i * 16 + (thread() & 15), S::kRows - 1);
      first[i] = S::place(m / S::kWide * S::kCellsWide + m % S::kWide, 0);
      if (S::kPieces == 2) first[i] += thread() >> 4 & 1 ? offset(1) : 0;
    }
  }
  // Of a piece of K.
  DPA_DEVICE static constexpr uint32_t offset(int piece) {
    const int tap = piece / S::kPieces;
    return S::place(tap / 4 * S::kCellsWide + tap % 4, piece % S::kPieces);
  }
  DPA_DEVICE void load(uint4 (&a)[2], uint32_t cells, int step) const {
    uint32_t on = offset(2 * step);
    if (S::kPieces != 2 && (thread() >> 4 & 1)) on = offset(2 * step + 1);
    const uint32_t rows[2] = {cells + first[0] + on, cells + first[1] + on};
    load_a<T>(a, rows, 0);
  }
};

template <class T>
using StemSums = float[2][StemTile<T>::kColumns / 8][4];

template <class T, bool kWgmma>
DPA_DEVICE void multiply_cells(const StemRows<T>& lanes, uint32_t cells, uint32_t weights, StemSums<T>& sum) {
  using S = StemTile<T>;
  if constexpr (kWgmma) {
    uint4 a[2][2][2];
#pragma unroll
    for (int group = 0; group < S::kSteps / 2; group++) {
#pragma unroll
      for (int k = 0; k < 2; k++) lanes.load(a[group % 2][k], cells, 2 * group + k);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int step = 2 * group + k;
        const uint64_t b = wgmma_operand(weights + step / 4 * S::kColumns * kChunkBytes + step % 4 * 256, 128, 1024);
#pragma unroll
        for (int i = 0; i < 2; i++)
          wgmma<S::kColumns>(typename T::Math{}, reinterpret_cast<float(&)[S::kColumns / 2]>(sum[i]),
                             a[group % 2][k][i], b);
      }
      wgmma_commit();
      if (group + 1 < S::kSteps / 2)
        wgmma_wait<1>();
      else
        wgmma_wait<0>();
    }
  } else {
    const uint32_t b_at = weights + b_row(thread() & 31);
#pragma unroll 2
    for (int step = 0; step < S::kSteps; step++) {
      uint4 a[2];
      lanes.load(a, cells, step);
#pragma unroll
      for (int j = 0; j < S::kColumns / 16; j++) {
        uint32_t b[4];
        load_matrix_x4(b, b_at + step / 4 * S::kColumns * kChunkBytes + step % 4 * 256 + j * 2048);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          mma(typename T::Math{}, sum[i][2 * j], a[i], b[0], b[1]);
          mma(typename T::Math{}, sum[i][2 * j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
}

// relu(sum scale + shift), as stored values, to shared memory.
template <class T>
DPA_DEVICE void keep_pixels(const Stem& v, const StemSums<T>& sum) {
  using S = StemTile<T>;
  S& tile = S::at();
  const int lane = thread() & 31;
#pragma unroll
  for (int j = 0; j < S::kColumns / 8; j++) {
    const int column = j * 8 + (lane & 3) * 2;
    const float2 scale = *reinterpret_cast<const float2*>(tile.scale + column),
                 shift = *reinterpret_cast<const float2*>(tile.shift + column);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int m = (thread() >> 5) * 32 + k / 2 * 16 + k % 2 * 8 + (lane >> 2);
      float x = sum[k / 2][j][k % 2 * 2] * scale.x + shift.x, y = sum[k / 2][j][k % 2 * 2 + 1] * scale.y + shift.y;
      if (v.relu) x = x < 0.0f ? 0.0f : x, y = y < 0.0f ? 0.0f : y;
      if (m >= S::kRows) continue;
      uint8_t* to = tile.made + m * S::kPitch + column * S::kElement;
      if constexpr (T::kElements == 4)
        *reinterpret_cast<float2*>(to) = {x, y};
      else
        *reinterpret_cast<uint32_t*>(to) = pack(typename T::Math{}, x, y);
    }
  }
}

// A thread: pieces of pooled pixels. Pixels beyond an edge are no values.
template <class T>
DPA_DEVICE void pool_pixels(const Stem& v, int tile) {
  using S = StemTile<T>;
  constexpr int kRow = S::kColumns / T::kElements, kItems = kStemPooledHeight * kStemPooledWidth * kRow;
  const StemPlace at(v, tile);
#pragma unroll 1
  for (int i = thread(); i < kItems; i += kThreads) {
    const int piece = i % kRow, pixel = i / kRow, p = pixel / kStemPooledWidth, q = pixel - p * kStemPooledWidth;
    const int row = at.row + p, column = at.column + q;
    if (row >= v.pooled_height || column >= v.pooled_width) continue;
    float best[T::kElements];
#pragma unroll
    for (int e = 0; e < T::kElements; e++) best[e] = as_float(0xff800000u);
#pragma unroll
    for (int k = 0; k < 9; k++) {
      const int y = 2 * row - 1 + k / 3, x = 2 * column - 1 + k % 3;
      if (y < 0 || x < 0 || y >= v.height || x >= v.width) continue;
      float value[T::kElements];
      widen<T>(*reinterpret_cast<const uint4*>(S::at().made + ((2 * p + k / 3) * S::kWide + 2 * q + k % 3) * S::kPitch +
                                               piece * kPieceBytes),
               value);
#pragma unroll
      for (int e = 0; e < T::kElements; e++) best[e] = larger_or_nan(value[e], best[e]);
    }
    const int64_t to = ((int64_t{at.n} * v.pooled_height + row) * v.pooled_width + column) * kRow + piece;
    store_16(static_cast<uint4*>(v.out) + to, narrow<T>(best));
  }
}

// Tiles `first`, `first` + `step`, ... of one network. `wait` returns when the cells are complete.
template <class T, bool kWgmma, class Wait>
DPA_DEVICE void stem(const Stem& v, int first, int step, Wait&& wait) {
  using S = StemTile<T>;
  S& tile = S::at();
  const uint32_t weights = shared_address(tile.weights), barrier = shared_address(&tile.barrier);
  if constexpr (kWgmma) {
    if (thread() == 0) {
      barrier_init(barrier, 1);
      barrier_init_fence();
      barrier_expect(barrier, S::kWeightBytes);
      copy_bulk(weights, v.weights, S::kWeightBytes, barrier);
    }
  } else {
#pragma unroll 4
    for (int i = thread(); i < S::kWeightBytes / 16; i += kThreads)
      copy_async_line_16(weights + i * 16, static_cast<const uint8_t*>(v.weights) + i * 16);
  }
  if (thread() < S::kColumns) {
    const float scale = v.scale ? v.scale[thread()] : 1.0f;
    tile.scale[thread()] = scale;
    tile.shift[thread()] = (v.shift ? v.shift[thread()] : 0.0f) + (v.bias ? v.bias[thread()] * scale : 0.0f);
  }
  wait();
  const StemRows<T> lanes;
  if (first < v.tiles) load_cells<T>(v, first, 0);
  copy_async_commit();
  bool waited = !kWgmma;
  int buffer = 0;
#pragma unroll 1
  for (int i = first; i < v.tiles; i += step, buffer ^= 1) {
    if (i + step < v.tiles) load_cells<T>(v, i + step, buffer ^ 1);
    copy_async_commit();
    copy_async_wait<1>();
    sync_block();  // the cells are there; the tile before has been pooled
    if (!waited) barrier_wait(barrier, 0), waited = true;
    StemSums<T> sum = {};
    multiply_cells<T, kWgmma>(lanes, shared_address(tile.cells[buffer]), weights, sum);
    keep_pixels<T>(v, sum);
    sync_block();
    pool_pixels<T>(v, i);
  }
  copy_async_wait<0>();
}

}  // namespace dpa::kernels::conv2d::device
