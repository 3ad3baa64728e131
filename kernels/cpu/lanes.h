// Vectors of floats in the compiler's own vector types: one source for every instruction set. A file that includes this
// header has chosen, before it, the namespace of the level it compiles (DPA_LEVEL: nothing compiled for one instruction
// set can then be linked in place of another's), how many lanes a register has (DPA_LANES), how many registers hold
// sums in a GEMM (DPA_SUMS), and how many panels of weights a GEMM takes at once (DPA_PANELS).
#pragma once
#include <cstdint>
#include <cstring>

#ifndef DPA_LEVEL
#define DPA_LEVEL portable
#define DPA_LANES 4
#define DPA_SUMS 8
#define DPA_PANELS 1
#endif
#ifdef __OPTIMIZE__
#define DPA_INLINE inline __attribute__((always_inline))
#else  // in unoptimised code it would only take longer to compile
#define DPA_INLINE inline
#endif

namespace dpa::kernels::cpu::DPA_LEVEL {

constexpr int kLanes = DPA_LANES;
typedef float Floats __attribute__((vector_size(4 * DPA_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * DPA_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * DPA_LANES)));

DPA_INLINE Floats splat(float x) { return x - Floats{}; }

DPA_INLINE Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
DPA_INLINE Words load(const uint32_t* from) {
  Words x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
DPA_INLINE void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

/// The first `count` lanes from memory, the others zero; nothing beyond is read.
DPA_INLINE Floats load_first(const float* from, int count) {
  if (count >= kLanes) return load(from);
  Floats x = {};
  for (int i = 0; i < count; i++) x[i] = from[i];
  return x;
}
/// `x` in the first `count` lanes, zero in the others.
DPA_INLINE Floats keep_first(Floats x, int count) {
  for (int i = 0; i < kLanes; i++) x[i] = i < count ? x[i] : 0.0f;
  return x;
}

DPA_INLINE Floats as_floats(Words x) { return reinterpret_cast<Floats>(x); }
DPA_INLINE Words as_words(Floats x) { return reinterpret_cast<Words>(x); }

DPA_INLINE float sum(Floats x) {
  typedef float Quarter __attribute__((vector_size(16)));
  Quarter parts[kLanes / 4];
  std::memcpy(parts, &x, sizeof x);
  Quarter total = parts[0];
  for (int i = 1; i < kLanes / 4; i++) total += parts[i];
  return (total[0] + total[2]) + (total[1] + total[3]);
}

/// A half of 16 bits, in the low end of each word, as a float.
DPA_INLINE Floats from_bfloat16(Words low) { return as_floats(low << 16); }
DPA_INLINE Floats from_float16(Words low) {
  // The exponent moves by a multiplication, which handles subnormal numbers too; infinity and NaN keep theirs.
  constexpr float kRebias = 0x1p112f;
  const Words magnitude = (low & 0x7fff) << 13;
  const Words finite = as_words(as_floats(magnitude) * kRebias);
  const Words special = magnitude | 0x7f800000u;
  return as_floats(((low & 0x7c00) == 0x7c00 ? special : finite) | (low & 0x8000) << 16);
}
/// To the nearest bfloat16, ties to even; NaN stays NaN.
DPA_INLINE Words to_bfloat16(Floats x) {
  const Words bits = as_words(x);
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return x == x ? rounded : (bits >> 16 | 0x40);
}
DPA_INLINE void store_halves(uint16_t* to, Words low) {
  const Halves x = __builtin_convertvector(low, Halves);
  std::memcpy(to, &x, sizeof x);
}
#ifdef DPA_FLOAT16
/// To the nearest float16, of 16 lanes; what is too large becomes infinite.
DPA_INLINE void store_float16(uint16_t* to, Floats x) {
  const __m256h halves = _mm512_cvtxps_ph(reinterpret_cast<__m512>(x));
  std::memcpy(to, &halves, sizeof halves);
}
#endif
#ifdef DPA_TILES
/// As the sum of two bfloat16, of 16 lanes.
DPA_INLINE void store_two_bfloat16(uint16_t* high, uint16_t* low, Floats x) {
  const __m256bh first = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
  std::memcpy(high, &first, sizeof first);
  Halves bits;
  std::memcpy(&bits, &first, sizeof first);
  const __m256bh second =
      _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x - from_bfloat16(__builtin_convertvector(bits, Words))));
  std::memcpy(low, &second, sizeof second);
}
#endif
DPA_INLINE Words load_halves(const uint16_t* from) {
  Halves x;
  std::memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, Words);
}

DPA_INLINE Floats rectified(Floats x) { return x < 0.0f ? Floats{} : x; }  // NaN stays

/// mish(x) as in kernels/math/mish.h.
DPA_INLINE Floats mish(Floats x) {
  constexpr float kMagic = 12582912.0f;
  Floats y = x < 20.0f ? x : splat(20.0f);
  const auto vanishes = y < -87.0f;
  y = vanishes ? splat(-87.0f) : y;
  const Floats shifted = y * 1.44269504f + kMagic;
  const Floats k = shifted - kMagic;
  const Floats r = (y - k * 0.693359375f) + k * 2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Floats scale = as_floats((as_words(shifted) + 127) << 23);
  const Floats e = vanishes ? Floats{} : p * scale;
  const Floats n = e * (e + 2.0f);
  return x * (n / (n + 2.0f));
}

}  // namespace dpa::kernels::cpu::DPA_LEVEL
