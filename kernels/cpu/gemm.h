// The GEMM of a level: rows of inputs times panels of weights.
//
//   task     a group of panels (1, 2 or 4: 16, 32 or 64 output channels) x a range of rows
//   order    for a block of kBlock steps of the depth: for a block of rows: the register block; so a block of weights
//            (16 KB a panel) is read from memory once, and then lies in a cache. The blocks of rows fetch the next block
//            of weights between them, a part each, so that memory is as busy as the multipliers all the time
//   registers  rows x panels of sums; a step loads each panel's word for 16 outputs once and multiplies it with one
//            input of each row, broadcast
//
// Rows are ordered (time, sample). Rows of one block that agree in time agree in which taps read the zeros before or
// behind the sample, and those taps are left out: 30 % of the work of 5 taps at 4 times, where the batch fills a block.
//
// Sums: kBlock steps in registers, then added to the output: an error that grows with the square roots of both lengths.
#pragma once
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/lanes.h"

namespace dpa::kernels::cpu::DPA_LEVEL {

constexpr int kBlock = 256;
constexpr int kAhead = 256;                // words of a panel that are fetched ahead
constexpr int kVectors = kPanel / kLanes;  // of a panel
constexpr int kMaxRows = 8;

/// The words of a block of some panels.
struct Panels {
  const uint32_t* at;
  int64_t stride;  // words from panel to panel
};
}  // namespace dpa::kernels::cpu::DPA_LEVEL

#include "kernels/cpu/gemm_float16.h"  // where DPA_FLOAT16 is defined

namespace dpa::kernels::cpu::DPA_LEVEL {

/// One step: R rows x P panels. `rows[r]` points to the block's first input of row r.
template <Weights kKind, int R, int P>
DPA_INLINE void step(Floats (&sums)[R][P * kVectors], const void* const* rows, const uint32_t* weights, int64_t panel,
                     int s) {
#pragma GCC unroll 16
  for (int v = 0; v < P * kVectors; v++) {
    const Words words = load(weights + v / kVectors * panel + s * kPanel + v % kVectors * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      if constexpr (kKind == Weights::kFloat32) {
        sums[r][v] += as_floats(words) * static_cast<const float*>(rows[r])[s];
      } else if constexpr (kKind == Weights::kBFloat16Dot) {
#ifdef DPA_DOT
        sums[r][v] = DPA_DOT(sums[r][v], words, Words{} + static_cast<const uint32_t*>(rows[r])[s]);
#endif
      } else {
        constexpr bool kBrain = kKind == Weights::kBFloat16;
        const Floats low = kBrain ? from_bfloat16(words) : from_float16(words & 0xffff);
        const Floats high = kBrain ? as_floats(words & 0xffff0000u) : from_float16(words >> 16);
        const float* in = static_cast<const float*>(rows[r]) + 2 * s;
        sums[r][v] += low * in[0];
        sums[r][v] += high * in[1];
      }
    }
  }
}

/// The register block: R rows x P panels over `steps` steps, added to the outputs, or stored where `fresh`. Meanwhile
/// it prefetches kFetched panels of as many steps from `next` on.
template <Weights kKind, int R, int P, int kFetched>
void block(const void* const* rows_, Panels weights, int steps, float* const* outputs, bool fresh, Panels next) {
#ifdef DPA_FLOAT16
  if constexpr (kKind == Weights::kBFloat16AsFloat16)
    return float16_block<R, P, kFetched>(rows_, weights, steps, outputs, fresh, next);
#endif
  const void* rows[R];
  for (int r = 0; r < R; r++) rows[r] = rows_[r];
  Floats sums[R][P * kVectors] = {};
  for (int s = 0; s < steps; s++) {
#pragma GCC unroll 4
    for (int p = 0; p < kFetched; p++) __builtin_prefetch(next.at + p * next.stride + s * kPanel);
    step<kKind, R, P>(sums, rows, weights.at, weights.stride, s);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
    for (int v = 0; v < P * kVectors; v++) {
      float* to = outputs[r] + v * kLanes;
      store(to, fresh ? sums[r][v] : sums[r][v] + load(to));
    }
  }
}

/// The block of `r` rows, where r is 8, 4, 2 or 1.
template <Weights kKind, int P, int kFetched>
void block_of(int r, const void* const* rows, Panels weights, int steps, float* const* outputs, bool fresh,
              Panels next) {
  if constexpr (P * kVectors * 8 <= DPA_SUMS) {
    if (r == 8) return block<kKind, 8, P, kFetched>(rows, weights, steps, outputs, fresh, next);
  }
  if constexpr (P * kVectors * 4 <= DPA_SUMS) {
    if (r == 4) return block<kKind, 4, P, kFetched>(rows, weights, steps, outputs, fresh, next);
  }
  if (r == 2) return block<kKind, 2, P, kFetched>(rows, weights, steps, outputs, fresh, next);
  return block<kKind, 1, P, kFetched>(rows, weights, steps, outputs, fresh, next);
}

/// The steps whose taps lie inside the sample, for outputs of times `begin` to `last`.
inline void inside(const Gemm& p, int taps, int begin, int last, int& lo, int& hi) {
  const int from = begin * p.stride + p.first, to = last * p.stride + p.first;  // input times of their first taps
  const int skipped = to < 0 ? -to : 0, kept = p.times_in - from;
  lo = (skipped < taps ? skipped : taps) * p.steps_per_tap;
  hi = (kept < taps ? kept : taps) * p.steps_per_tap;
}

}  // namespace dpa::kernels::cpu::DPA_LEVEL

#include "kernels/cpu/gemm_tiles.h"  // where DPA_TILES is defined

namespace dpa::kernels::cpu::DPA_LEVEL {

template <Weights kKind, int P>
void gemm_task(const Gemm& p, int panel, int row_begin, int row_end) {
  constexpr bool kConverts = kKind == Weights::kBFloat16AsFloat16;
  constexpr int kElement = input_bytes(kKind);
  constexpr int kInputs = kKind == Weights::kFloat32 ? 1 : 2;  // of a step
  constexpr int kRows = P * kVectors * 8 <= DPA_SUMS ? 8 : P * kVectors * 4 <= DPA_SUMS ? 4 : 2;
  const int64_t words = static_cast<int64_t>(p.steps) * kPanel;
  const int taps = p.steps / p.steps_per_tap;
  for (int from = 0; from < p.steps; from += kBlock) {
    const int to = from + kBlock < p.steps ? from + kBlock : p.steps;
    // What is fetched, as seen from this block: the next of these panels, or the first of the panels behind them; where
    // one block of rows is all, what it reads itself a little later.
    const int64_t following = to < p.steps ? int64_t{kBlock} * kPanel : P * words - int64_t{from} * kPanel,
                  next = row_end - row_begin > kRows || kConverts ? following : kAhead;
    Panels multiplied = {p.weights + panel * words + int64_t{from} * kPanel, words};
    const Panels original = multiplied;
#ifdef DPA_FLOAT16
    alignas(64) uint32_t converted[kConverts ? P * kBlock * kPanel : 1];
    if constexpr (kConverts) {
      multiplied = {converted, kBlock * kPanel};
      to_float16<P>(original, to - from, converted, multiplied.stride);
    }
#endif
    int t = row_begin / p.batch, b = row_begin % p.batch;  // of the next row
    for (int row = row_begin, r; row < row_end; row += r) {
      r = kRows;
      while (r > row_end - row) r /= 2;
      int lo, hi;
      inside(p, taps, t, t + (b + r - 1) / p.batch, lo, hi);
      lo = lo < from ? from : lo, hi = hi > to ? to : hi;
      const bool fresh = from == 0;
      if (lo >= hi) lo = hi = from;
#ifdef DPA_FLOAT16
      if constexpr (kConverts) lo -= lo % kChain;  // chains end at the same steps in whatever block a row is
#endif
      const void* rows[kMaxRows];
      float* outputs[kMaxRows];
      for (int i = 0; i < r; i++) {
        rows[i] = static_cast<const char*>(p.input) +
                  (b * p.input_sample + t * p.input_time + static_cast<int64_t>(lo) * kInputs) * kElement;
        outputs[i] = p.output + b * p.output_sample + t * p.output_time + static_cast<int64_t>(panel) * kPanel;
        if (++b == p.batch) b = 0, t++;
      }
      if (lo == hi && !fresh) continue;
      const int64_t offset = static_cast<int64_t>(lo - from) * kPanel;
      const Panels weights = {multiplied.at + offset, multiplied.stride};
      const int done = row - row_begin, all = row_end - row_begin;
      const int begin = P * done / all, end = P * (done + r) / all;
      const Panels fetched = {original.at + offset + next + begin * words, words};
      if (end - begin > (P + 1) / 2)
        block_of<kKind, P, P>(r, rows, weights, hi - lo, outputs, fresh, fetched);
      else if (end - begin > 1)
        block_of<kKind, P, (P + 1) / 2>(r, rows, weights, hi - lo, outputs, fresh, fetched);
      else if (end > begin)
        block_of<kKind, P, 1>(r, rows, weights, hi - lo, outputs, fresh, fetched);
      else
        block_of<kKind, P, 0>(r, rows, weights, hi - lo, outputs, fresh, fetched);
    }
  }
}

template <Weights kKind>
void gemm_of(const Gemm& p, const Tasks& tasks, int64_t begin, int64_t end) {
  const int rows = p.batch * p.times, ranges = (rows + tasks.rows - 1) / tasks.rows;
  for (int64_t task = begin; task < end; task++) {
    int panel = static_cast<int>(task / ranges) * tasks.panels;
    const int row = static_cast<int>(task % ranges) * tasks.rows;
    const int row_end = row + tasks.rows < rows ? row + tasks.rows : rows;
    int left = p.panels - panel < tasks.panels ? p.panels - panel : tasks.panels;
    if constexpr (DPA_PANELS >= 4 && kKind != Weights::kBFloat16AsFloat16) {
      for (; left >= 4; left -= 4, panel += 4) gemm_task<kKind, 4>(p, panel, row, row_end);
    }
    if constexpr (DPA_PANELS >= 2) {
      for (; left >= 2; left -= 2, panel += 2) gemm_task<kKind, 2>(p, panel, row, row_end);
    }
    for (; left > 0; left--, panel++) gemm_task<kKind, 1>(p, panel, row, row_end);
  }
}

inline void gemm(const Gemm& p, const Tasks& tasks, int64_t begin, int64_t end) {
  switch (p.kind) {
    case Weights::kFloat32: return gemm_of<Weights::kFloat32>(p, tasks, begin, end);
    case Weights::kFloat16: return gemm_of<Weights::kFloat16>(p, tasks, begin, end);
    case Weights::kBFloat16: return gemm_of<Weights::kBFloat16>(p, tasks, begin, end);
    case Weights::kBFloat16Dot:
#ifdef DPA_DOT
      return gemm_of<Weights::kBFloat16Dot>(p, tasks, begin, end);
#else
      return;
#endif
    case Weights::kBFloat16AsFloat16:
#ifdef DPA_FLOAT16
      return gemm_of<Weights::kBFloat16AsFloat16>(p, tasks, begin, end);
#else
      return;
#endif
    case Weights::kBFloat16Tiles:
#ifdef DPA_TILES
      return gemm_in_tiles(p, tasks, begin, end);
#else
      return;
#endif
  }
}

}  // namespace dpa::kernels::cpu::DPA_LEVEL
