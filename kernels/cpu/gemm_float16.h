// The GEMM of bfloat16 weights in float16 arithmetic: 32 multiply-adds an instruction, for processors whose dot products
// of bfloat16 run at half the rate of their float32 (Intel's since Sapphire Rapids, where AMX is not at hand).
//
//   convert   a task's block of weights (kBlock steps), once for all of its rows, into L1
//   chain     kChain steps summed in float16: of a word's two halves the even inputs' sums, and the odd inputs'
//   flush     both added, widened, and added to float32 sums, two panels in one register, their outputs interleaved
//
// The inputs are float16. What overflows is infinite, reaches a GroupNorm as infinity or NaN, and is noticed there
// (Epilogue::overflow): the call is then repeated with kBFloat16.
//
// A chain's relative error is about 2^-12 * sqrt(kChain / 2), 1e-3, as much as the rounding of inputs to bfloat16.
#pragma once
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/lanes.h"

#ifdef DPA_FLOAT16
namespace dpa::kernels::cpu::DPA_LEVEL {

constexpr int kChain = 32;
constexpr int kLogScale = 4;  // of converted weights: small ones stay exact, and sums have room up to 2^12

/// Two bfloat16 a word as two float16, times kScale: exactly from 2^-18 on, zero below, infinite from 2^12 on.
DPA_INLINE __m512i to_float16(const uint32_t* from) {
  constexpr int16_t kRebias = (127 - 15 - kLogScale) << 7, kInfinite = 31 << 7;
  const __m512i words = _mm512_loadu_si512(from), magnitudes = _mm512_set1_epi16(0x7fff);
  const __m512i small = _mm512_subs_epu16(_mm512_and_si512(words, magnitudes), _mm512_set1_epi16(kRebias));
  const __m512i halves = _mm512_slli_epi16(_mm512_min_epu16(small, _mm512_set1_epi16(kInfinite)), 3);
  constexpr int kSelect = 0xca;  // where the first is set the second, else the third
  return _mm512_ternarylogic_epi32(magnitudes, halves, words, kSelect);
}

template <int P>
void to_float16(Panels from, int steps, uint32_t* to, int64_t stride) {
  for (int p = 0; p < P; p++)
    for (int s = 0; s < steps; s++)
      _mm512_store_si512(to + p * stride + s * kPanel, to_float16(from.at + p * from.stride + s * kPanel));
}

/// Adds two panels' chains to their sums: of each output first's, then second's, the first 8 outputs in `sums[0]`.
DPA_INLINE void flush(__m512h first, __m512h second, __m512* sums) {
  constexpr __mmask32 kOdd = 0xaaaaaaaau;
  const __m512h even = _mm512_mask_blend_ph(kOdd, first, second), odd = _mm512_mask_blend_ph(kOdd, second, first);
  const __m512i total =
      _mm512_castph_si512(_mm512_add_ph(even, _mm512_castsi512_ph(_mm512_rol_epi32(_mm512_castph_si512(odd), 16))));
  sums[0] = _mm512_add_ps(sums[0], _mm512_cvtxph_ps(_mm256_castsi256_ph(_mm512_castsi512_si256(total))));
  sums[1] = _mm512_add_ps(sums[1], _mm512_cvtxph_ps(_mm256_castsi256_ph(_mm512_extracti64x4_epi64(total, 1))));
}
/// Which of a pair of sums the outputs of the first (0) or second (1) panel are.
DPA_INLINE Floats outputs_of(const __m512* sums, int second) {
  const __m512i first = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i index = _mm512_add_epi32(first, _mm512_set1_epi32(second));
  constexpr float kUnscale = 1.0f / (1 << kLogScale);
  return reinterpret_cast<Floats>(_mm512_permutex2var_ps(sums[0], index, sums[1])) * kUnscale;
}

/// As `block`, on converted weights.
template <int R, int P, int kFetched>
void float16_block(const void* const* rows_, Panels weights, int steps, float* const* outputs, bool fresh,
                   Panels next) {
  static_assert(P <= 2, "a pair of panels shares its sums");
  const uint32_t* rows[R];
  for (int r = 0; r < R; r++) rows[r] = static_cast<const uint32_t*>(rows_[r]);
  __m512 sums[R][2] = {};
  for (int from = 0; from < steps; from += kChain) {
    const int to = from + kChain < steps ? from + kChain : steps;
    __m512h chains[R][P];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) chains[r][p] = _mm512_setzero_ph();
    for (int s = from; s < to; s++) {
#pragma GCC unroll 2
      for (int p = 0; p < kFetched; p++) __builtin_prefetch(next.at + p * next.stride + s * kPanel);
      __m512h w[P];
#pragma GCC unroll 2
      for (int p = 0; p < P; p++)
        w[p] = _mm512_castsi512_ph(_mm512_load_si512(weights.at + p * weights.stride + s * kPanel));
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const __m512h x = _mm512_castsi512_ph(_mm512_set1_epi32(static_cast<int>(rows[r][s])));
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) chains[r][p] = _mm512_fmadd_ph(w[p], x, chains[r][p]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) flush(chains[r][0], chains[r][P - 1], sums[r]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) {
      float* to = outputs[r] + p * kPanel;
      const Floats sum = outputs_of(sums[r], p);
      store(to, fresh ? sum : sum + load(to));
    }
}

}  // namespace dpa::kernels::cpu::DPA_LEVEL
#endif
