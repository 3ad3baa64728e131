// The GEMM of bfloat16 weights in tiles of AMX: 16 rows x 16 outputs x 32 inputs an instruction.
//
//   inputs    two bfloat16 an activation, the value rounded and what the rounding left over: twice the multiplications,
//             and sums as exact as of float32 activations
//   row tile  up to 16 rows of one stride: samples of one time, or times of one sample (RowTiles)
//   weights   16 steps of a panel are a tile as they lie
//   block     2 row tiles x 2 panels, or 1 x 4, over the whole depth: 4 sums hide the tiles' latency. Nothing is fetched
//             ahead: requests would wait with the tiles' own for the buffers of L1; the processor's prefetcher has others
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
  /// Blocks of 1 row tile have its rows in all registers, those of 2 the second's rows in 2, 3 and 5.
  void set(int first, int second) {
    if (first == first_ && second == second_) return;
    first_ = first, second_ = second;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    static_assert(sizeof shapes == 64, "what the instruction reads");
    for (int i = 0; i < 8; i++) {
      shapes.bytes[i] = 64;
      shapes.rows[i] = i >= 6 ? kTileRows : i == 2 || i == 3 || i == 5 ? second : first;
    }
    // The compiler does not know that the instruction reads memory.
    asm volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
  }

 private:
  int first_ = 0, second_ = 0;
};

/// One or two row tiles: where their first row's inputs and outputs are.
struct TileInputs {
  const uint16_t* rows[2];
  int64_t row, low;  // elements from row to row, and to what the rounding left over
};

/// Sums += inputs x weights, of R row tiles and P panels over 16 steps.
template <int R, int P>
DPA_INLINE void multiply_tiles(const TileInputs& in, const uint32_t* weights, int64_t panel) {
  const auto row_bytes = static_cast<size_t>(2 * in.row);
  if constexpr (R == 2) {
    _tile_loadd(6, weights, 64);
    if constexpr (P == 2) _tile_loadd(7, weights + panel, 64);
    for (const int64_t part : {int64_t{0}, in.low}) {
      _tile_loadd(4, in.rows[0] + part, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (P == 2) _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, in.rows[1] + part, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (P == 2) _tile_dpbf16ps(3, 5, 7);
    }
  } else {
    _tile_loadd(4, in.rows[0], row_bytes);
    _tile_loadd(5, in.rows[0] + in.low, row_bytes);
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
}

/// The same over fewer steps.
template <int R, int P>
void multiply_last_tiles(const TileInputs& in, const int* counts, const uint32_t* weights, int64_t panel, int steps) {
  alignas(64) uint32_t words[P][kTile] = {};
  alignas(64) uint32_t inputs[2][2][kTile] = {};
  for (int p = 0; p < P; p++) std::memcpy(words[p], weights + p * panel, sizeof(uint32_t) * kPanel * steps);
  for (int part = 0; part < 2; part++)
    for (int r = 0; r < R; r++)
      for (int i = 0; i < counts[r]; i++)
        std::memcpy(inputs[part][r] + i * kPanel, in.rows[r] + part * in.low + i * in.row, sizeof(uint32_t) * steps);
  const auto at = [&](int r) { return reinterpret_cast<const uint16_t*>(inputs[0][r]); };
  asm volatile("" : : "r"(words), "r"(inputs) : "memory");
  multiply_tiles<R, P>({{at(0), at(1)}, 2 * kPanel, 2 * 2 * kTile}, words[0], kTile);
}

/// The row tiles `tile` .. tile + R - 1 of P panels.
template <int R, int P>
void tile_block(const Gemm& p, const RowTiles& tiles, int tile, int panel, TileShapes& shapes) {
  const int64_t words = static_cast<int64_t>(p.steps) * kPanel;
  TileInputs in = {{}, tiles.samples ? p.input_sample : p.input_time, p.input_low};
  float* outputs[R];
  int counts[R], lo = p.steps, hi = 0;
  for (int r = 0; r < R; r++) {
    const int line = (tile + r) / tiles.per_line, first = (tile + r) % tiles.per_line * tiles.rows;
    const int b = tiles.samples ? first : line, t = tiles.samples ? line : first;
    const int left = (tiles.samples ? p.batch : p.times) - first;
    counts[r] = left < tiles.rows ? left : tiles.rows;
    in.rows[r] = static_cast<const uint16_t*>(p.input) + b * p.input_sample + t * p.input_time;
    outputs[r] = p.output + b * p.output_sample + t * p.output_time + static_cast<int64_t>(panel) * kPanel;
    int from, to;
    inside(p, p.steps / p.steps_per_tap, t, tiles.samples ? t : t + counts[r] - 1, from, to);
    lo = from < lo ? from : lo, hi = to > hi ? to : hi;
  }
  shapes.set(counts[0], counts[R - 1]);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const uint32_t* weights = p.weights + panel * words + static_cast<int64_t>(lo) * kPanel;
  for (int r = 0; r < R; r++) in.rows[r] += int64_t{2} * lo;
  asm volatile("" : : : "memory");  // the inputs are written
  int s = lo;
  for (; s + kTileRows <= hi; s += kTileRows) {
    multiply_tiles<R, P>(in, weights, words);
    weights += kTile;
    for (int r = 0; r < R; r++) in.rows[r] += 2 * kTileRows;
  }
  if (s < hi) multiply_last_tiles<R, P>(in, counts, weights, words, hi - s);
  const auto row_bytes = static_cast<size_t>(4 * (tiles.samples ? p.output_sample : p.output_time));
  _tile_stored(0, outputs[0], row_bytes);
  if constexpr (P >= 2) _tile_stored(1, outputs[0] + kPanel, row_bytes);
  if constexpr (P == 4) {
    _tile_stored(2, outputs[0] + 2 * kPanel, row_bytes);
    _tile_stored(3, outputs[0] + 3 * kPanel, row_bytes);
  }
  if constexpr (R == 2) {
    _tile_stored(2, outputs[1], row_bytes);
    if constexpr (P == 2) _tile_stored(3, outputs[1] + kPanel, row_bytes);
  }
  asm volatile("" : : : "memory");
}

/// The row tiles `tile` to `end` of P panels, 2 tiles at a time where P is not 4.
template <int P>
void tile_task(const Gemm& p, const RowTiles& tiles, int tile, int end, int panel, TileShapes& shapes) {
  if constexpr (P <= 2) {
    for (; end - tile >= 2; tile += 2) tile_block<2, P>(p, tiles, tile, panel, shapes);
  }
  for (; tile < end; tile++) tile_block<1, P>(p, tiles, tile, panel, shapes);
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
    for (; left >= 4; left -= 4, panel += 4) tile_task<4>(p, tiles, tile, tile_end, panel, shapes);
    for (; left >= 2; left -= 2, panel += 2) tile_task<2>(p, tiles, tile, tile_end, panel, shapes);
    for (; left > 0; left--, panel++) tile_task<1>(p, tiles, tile, tile_end, panel, shapes);
  }
}

}  // namespace dpa::kernels::cpu::DPA_LEVEL
#endif
