// AVX-512's dot products of pairs of bfloat16, for the levels that have them.
#pragma once

/// sums + the dot products of the two halves of each word
#define DPA_DOT(sums, a, b) \
  reinterpret_cast<Floats>( \
      _mm512_dpbf16_ps(reinterpret_cast<__m512>(sums), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)))
