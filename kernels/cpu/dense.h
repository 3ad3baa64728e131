// Small GEMMs: FiLM's and the time embedding's linear layers, once a call, and the first and last layers' few actions.
//
//   dense  a task is 16 rows of weights; 4 rows x 4 samples (or 2, or 1) at a time, columns along the vectors. Weights
//          are read from memory once: further samples find the 4 rows in L1, and all samples together prefetch the next
//   pairs  the same of bfloat16, for many samples: 4 samples stay in L1 while the task's 16 rows pass
#pragma once
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/lanes.h"

namespace dpa::kernels::cpu::DPA_LEVEL {

template <DType kType>
DPA_INLINE Floats load_weights(const void* weights, int64_t at) {
  if constexpr (kType == DType::kFloat32) return load(static_cast<const float*>(weights) + at);
  const Words words = load_halves(static_cast<const uint16_t*>(weights) + at);
  return kType == DType::kBFloat16 ? from_bfloat16(words) : from_float16(words);
}
template <DType kType>
DPA_INLINE float load_weight(const void* weights, int64_t at) {
  if constexpr (kType == DType::kFloat32) return static_cast<const float*>(weights)[at];
  const Words words = Words{} + static_cast<const uint16_t*>(weights)[at];
  return (kType == DType::kBFloat16 ? from_bfloat16(words) : from_float16(words))[0];
}

/// Rows row .. row + R - 1 for samples n .. n + N - 1. Meanwhile rows `begin` to `end` of the R behind them are fetched.
template <DType kType, int R, int N>
void dense_block(const Dense& d, int row, int n, int begin, int end) {
  constexpr int kBytes = kType == DType::kFloat32 ? 4 : 2;
  Floats sums[R][N] = {};
  const int64_t at = static_cast<int64_t>(row) * d.columns;
  const char* next = static_cast<const char*>(d.weights) + (at + static_cast<int64_t>(R) * d.columns) * kBytes;
  const float* in = d.in + static_cast<int64_t>(n) * d.columns;
  int c = 0;
  for (; c + kLanes <= d.columns; c += kLanes) {
    for (int r = begin; r < end; r++) __builtin_prefetch(next + (static_cast<int64_t>(r) * d.columns + c) * kBytes);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const Floats w = load_weights<kType>(d.weights, at + static_cast<int64_t>(r) * d.columns + c);
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) sums[r][i] += w * load(in + static_cast<int64_t>(i) * d.columns + c);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int i = 0; i < N; i++) {
      float value = sum(sums[r][i]);
      for (int j = c; j < d.columns; j++)
        value += load_weight<kType>(d.weights, at + static_cast<int64_t>(r) * d.columns + j) *
                 in[static_cast<int64_t>(i) * d.columns + j];
      if (d.bias) value += d.bias[row + r];
      d.out[static_cast<int64_t>(n + i) * d.rows + row + r] = d.mish ? mish(splat(value))[0] : value;
    }
  }
}

template <DType kType, int R>
void dense_rows(const Dense& d, int row) {
  const auto part = [&](int n) { return static_cast<int>(int64_t{R} * n / d.samples); };
  int n = 0;
  for (; n + 4 <= d.samples; n += 4) dense_block<kType, R, 4>(d, row, n, part(n), part(n + 4));
  for (; n + 2 <= d.samples; n += 2) dense_block<kType, R, 2>(d, row, n, part(n), part(n + 2));
  for (; n < d.samples; n++) dense_block<kType, R, 1>(d, row, n, part(n), part(n + 1));
}

template <DType kType>
void dense_of(const Dense& d, int64_t begin, int64_t end) {
  int row = static_cast<int>(begin * kDenseRows);
  const int last = end * kDenseRows < d.rows ? static_cast<int>(end * kDenseRows) : d.rows;
  for (; row + 4 <= last; row += 4) dense_rows<kType, 4>(d, row);
  for (; row < last; row++) dense_rows<kType, 1>(d, row);
}

inline void dense(const Dense& d, int64_t begin, int64_t end) {
  switch (d.dtype) {
    case DType::kFloat32: return dense_of<DType::kFloat32>(d, begin, end);
    case DType::kFloat16: return dense_of<DType::kFloat16>(d, begin, end);
    case DType::kBFloat16: return dense_of<DType::kBFloat16>(d, begin, end);
    default: return;
  }
}

#ifdef DPA_DOT
/// The words of `count` numbers, two a word, where those are not a whole vector; the others are zero, and not read.
DPA_INLINE Words load_last(const uint16_t* from, int64_t count) {
  Words x = {};
  std::memcpy(&x, from, 2 * count);
  return x;
}

template <int R, int N>
DPA_INLINE void pairs_block(const Pairs& p, int64_t row, int64_t n) {
  Floats sums[R][N] = {};
  const uint16_t *weights = p.weights + row * p.columns, *in = p.in + n * p.columns;
  const auto step = [&](const auto& load_words) __attribute__((always_inline)) {
    Words x[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) x[i] = load_words(in + i * p.columns);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const Words w = load_words(weights + r * p.columns);
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) sums[r][i] = DPA_DOT(sums[r][i], w, x[i]);
    }
  };
  int64_t c = 0;
  for (; c + 2 * kLanes <= p.columns; c += 2 * kLanes)
    step([&](const uint16_t* row) { return load(reinterpret_cast<const uint32_t*>(row + c)); });
  if (c < p.columns) step([&](const uint16_t* row) { return load_last(row + c, p.columns - c); });
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) p.out[(n + i) * p.rows + row + r] = sum(sums[r][i]);
}

template <int N>
DPA_INLINE void pairs_of_samples(const Pairs& p, int64_t row, int64_t last, int64_t n) {
  for (; row + 4 <= last; row += 4) pairs_block<4, N>(p, row, n);
  for (; row < last; row++) pairs_block<1, N>(p, row, n);
}

inline void pairs(const Pairs& p, int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; task++) {
    const int64_t row = task * kDenseRows, last = row + kDenseRows < p.rows ? row + kDenseRows : p.rows;
    int64_t n = 0;
    for (; n + 4 <= p.samples; n += 4) pairs_of_samples<4>(p, row, last, n);
    for (; n < p.samples; n++) pairs_of_samples<1>(p, row, last, n);
  }
}
#endif

inline void narrow(const Narrow& n) {
  for (int c = 0; c < n.channels; c += kLanes) {
    const int valid = n.channels - c;
    Floats total = {};
    for (int i = 0; i < n.inputs; i++)
      total += load_first(n.weights + static_cast<int64_t>(i) * n.channels + c, valid) * n.in[i];
    store(n.out + c, total);
  }
}

inline float dot(const float* a, const float* b, int count) {
  Floats total = {};
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) total += load(a + i) * load(b + i);
  float value = sum(total);
  for (; i < count; i++) value += a[i] * b[i];
  return value;
}

}  // namespace dpa::kernels::cpu::DPA_LEVEL
