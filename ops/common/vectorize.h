// A function marked DPA_VECTORIZE is compiled for AVX-512, AVX2 and the baseline; the loader picks at run time. What
// its loops call is marked DPA_ALWAYS_INLINE: a call that stays would be to code of the baseline, and end the vectors.
#pragma once
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DPA_VECTORIZE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))
#else
#define DPA_VECTORIZE
#endif
#define DPA_ALWAYS_INLINE inline __attribute__((always_inline))
