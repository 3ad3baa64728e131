// The GEMM of bfloat16 weights in tiles of AMX: 16 rows x 16 outputs x 32 inputs an instruction.
//
//   inputs    two bfloat16 an activation, the value rounded and what the rounding left over: twice the multiplications,
//             and sums as exact as of float32 activations
//   row tile  up to 16 rows of one stride: samples of one time, or times of one sample (RowTiles)
//   weights   16 steps of a panel are a tile as they lie
//   block     a row tile x 4 panels, over the whole depth: 4 sums hide the tiles' latency, and 4 panels are 4 streams for
//             the processor's prefetcher. Nothing else is fetched ahead: requests would wait with the tiles' own loads
//             for the buffers of L1
//   last step where the depth ends within a tile: copies with zeros behind it
#pragma once
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/lanes.h"

#ifdef DPA_TILES
namespace dpa::kernels::cpu::DPA_LEVEL {

constexpr int kTile = kTileRows * kPanel;  // words

/// The shapes of the tile registers: 0 to 3 hold sums, 4 and 5 inputs, 6 and 7 weights.
class TileShapes {
 public:
  ~TileShapes() { _tile_release(); }
  void set(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    static_assert(sizeof shapes == 64, "what the instruction reads");
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = static_cast<uint8_t>(i < 6 ? rows : kTileRows);
    // The compiler does not know that the instruction reads memory.
    asm volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
  }

 private:
  int rows_ = 0;
};

/// The inputs of a row tile.
struct TileInputs {
  const uint16_t* at;  // of the first row
  int64_t row, low;    // elements from row to row, and to what the rounding left over
};

/// Sums += inputs x weights, of P panels over 16 steps.
template <int P>
DPA_INLINE void multiply_tiles(const TileInputs& in, const uint32_t* weights, int64_t panel) {
  const auto row_bytes = static_cast<size_t>(2 * in.row);
  _tile_loadd(4, in.at, row_bytes);
  _tile_loadd(5, in.at + in.low, row_bytes);
  _tile_loadd(6, weights, 64);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (P >= 2) {
    _tile_loadd(7, weights + panel, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_dpbf16ps(0, 5, 6);
  if constexpr (P >= 2) _tile_dpbf16ps(1, 5, 7);
  if constexpr (P == 4) {
    _tile_loadd(6, weights + 2 * panel, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, weights + 3 * panel, 64);
    _tile_dpbf16ps(3, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

/// The same over fewer steps.
template <int P>
void multiply_last_tiles(const TileInputs& in, int rows, const uint32_t* weights, int64_t panel, int steps) {
  alignas(64) uint32_t words[P][kTile] = {}, inputs[2][kTile] = {};
  for (int p = 0; p < P; p++) std::memcpy(words[p], weights + p * panel, sizeof(uint32_t) * kPanel * steps);
  for (int part = 0; part < 2; part++)
    for (int i = 0; i < rows; i++)
      std::memcpy(inputs[part] + i * kPanel, in.at + part * in.low + i * in.row, sizeof(uint32_t) * steps);
  asm volatile("" : : "r"(words), "r"(inputs) : "memory");
  multiply_tiles<P>({reinterpret_cast<const uint16_t*>(inputs), 2 * kPanel, 2 * kTile}, words[0], kTile);
}

/// A row tile of P panels.
template <int P>
void tile_block(const Gemm& p, const RowTiles& tiles, int tile, int panel, TileShapes& shapes) {
  const int line = tile / tiles.per_line, first = tile % tiles.per_line * tiles.rows;
  const int b = tiles.samples ? first : line, t = tiles.samples ? line : first;
  const int left = (tiles.samples ? p.batch : p.times) - first, rows = left < tiles.rows ? left : tiles.rows;
  int lo, hi;
  inside(p, p.steps / p.steps_per_tap, t, tiles.samples ? t : t + rows - 1, lo, hi);
  TileInputs in = {static_cast<const uint16_t*>(p.input) + b * p.input_sample + t * p.input_time + int64_t{2} * lo,
                   tiles.samples ? p.input_sample : p.input_time, p.input_low};
  const int64_t words = static_cast<int64_t>(p.steps) * kPanel;
  const uint32_t* weights = p.weights + panel * words + static_cast<int64_t>(lo) * kPanel;
  shapes.set(rows);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  asm volatile("" : : : "memory");  // the inputs are written
  int s = lo;
  for (; s + kTileRows <= hi; s += kTileRows, weights += kTile, in.at += 2 * kTileRows)
    multiply_tiles<P>(in, weights, words);
  if (s < hi) multiply_last_tiles<P>(in, rows, weights, words, hi - s);
  float* output = p.output + b * p.output_sample + t * p.output_time + static_cast<int64_t>(panel) * kPanel;
  const auto row_bytes = static_cast<size_t>(4 * (tiles.samples ? p.output_sample : p.output_time));
  _tile_stored(0, output, row_bytes);
  if constexpr (P >= 2) _tile_stored(1, output + kPanel, row_bytes);
  if constexpr (P == 4) {
    _tile_stored(2, output + 2 * kPanel, row_bytes);
    _tile_stored(3, output + 3 * kPanel, row_bytes);
  }
  asm volatile("" : : : "memory");
}

inline void gemm_in_tiles(const Gemm& p, const Tasks& tasks, int64_t begin, int64_t end) {
  const RowTiles tiles = row_tiles(p);
  const int ranges = (tiles.count() + tasks.rows - 1) / tasks.rows;
  TileShapes shapes;
  for (int64_t task = begin; task < end; task++) {
    int panel = static_cast<int>(task / ranges) * tasks.panels;
    const int tile = static_cast<int>(task % ranges) * tasks.rows;
    const int tile_end = tile + tasks.rows < tiles.count() ? tile + tasks.rows : tiles.count();
    int left = p.panels - panel < tasks.panels ? p.panels - panel : tasks.panels;
    for (int panels; left > 0; left -= panels, panel += panels) {
      panels = left >= 4 ? 4 : left >= 2 ? 2 : 1;
      const auto block = panels == 4 ? tile_block<4> : panels == 2 ? tile_block<2> : tile_block<1>;
      for (int i = tile; i < tile_end; i++) block(p, tiles, i, panel, shapes);
    }
  }
}

}  // namespace dpa::kernels::cpu::DPA_LEVEL
#endif
