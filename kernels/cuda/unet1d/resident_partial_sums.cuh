// Messages between the blocks of the one-sample kernel: partial sums of channel pairs. float32 weights: two words a
// pair, each a float whose lowest bit is the in-band flag, the step's parity. Other weights: one word of two 16-bit
// numbers, of the activations' type, with the flag in its lowest bit. The traffic of the sums through L2 is a good part
// of a layer's time, and the receiver rounds what it makes of them to 16 bits in any case.
#pragma once
#include <type_traits>

#include "kernels/cuda/unet1d/tile.cuh"
#include "kernels/plans/unet1d/resident_layout.h"

namespace dpa::kernels::unet1d {

// The 8 partial sums of each of a thread's pairs. Activation: float or a 16-bit type.
template <class Activation, int kPairs>
struct PartialSumMessages {
  static constexpr bool kWide = sizeof(Activation) == 4;
  static constexpr uint32_t kStride = solo_message_stride(kPairs, kWide);  // words from slice to slice
  static constexpr uint32_t kWordSums = kWide ? 1 : 2;                     // partial sums in a word
  using OutputWord = std::conditional_t<kWide, uint2, uint32_t>;

  const uint32_t* first;
  uint32_t apart, phase;  // words from pair to pair; parity
  int count;              // of the thread's pairs; it reads the first one instead of others
  OutputWord words[kPairs][kSlicesIn];

  __device__ __forceinline__ PartialSumMessages(const uint32_t* first, uint32_t apart, uint32_t phase, int count)
      : first(first), apart(apart), phase(phase), count(count), words() {}

  __device__ __forceinline__ OutputWord load(int pair, int slice) const {
    const uint32_t* at = first + (pair < count ? pair * apart : 0u) + slice * kStride;
    if constexpr (kWide)
      return ptx::load_message_8(at);
    else
      return ptx::load_message_word<void>(at);
  }
  __device__ __forceinline__ uint32_t stale(const OutputWord& w) const {  // in the lowest bit
    if constexpr (kWide)
      return (w.x ^ phase) | (w.y ^ phase);
    else
      return w ^ phase;
  }
  static __device__ __forceinline__ float2 open(const OutputWord& w) {
    if constexpr (kWide)
      return make_float2(__uint_as_float(w.x), __uint_as_float(w.y));
    else
      return unpack_pair<Activation>(w);
  }

  // Issues the first poll.
  __device__ __forceinline__ void poll() {
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
#pragma unroll
      for (int s = 0; s < kSlicesIn; s++) words[i][s] = load(i, s);
    }
  }
  // Whether a word is missing: the lowest bit of an OR of all words that differ.
  __device__ __forceinline__ bool missing() const {
    uint32_t wrong[kPairs][kSlicesIn / 2];
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
#pragma unroll
      for (int s = 0; s < kSlicesIn; s += 2) {
        if constexpr (kWide)
          wrong[i][s / 2] = ptx::or_of(ptx::either_differs(words[i][s].x, words[i][s].y, phase),
                                       ptx::either_differs(words[i][s + 1].x, words[i][s + 1].y, phase), 0);
        else
          wrong[i][s / 2] = ptx::either_differs(words[i][s], words[i][s + 1], phase);
      }
    }
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kPairs; i++)
      all = ptx::or_of(all, ptx::or_of(wrong[i][0], wrong[i][1], wrong[i][2]), wrong[i][3]);
    return all & 1;
  }
  // Polls again for missing words alone: the weights stream through the same L2. Then adds up.
  __device__ __forceinline__ void receive(float2 (&sum)[kPairs]) {
    while (missing()) {
#pragma unroll
      for (int i = 0; i < kPairs; i++) {
#pragma unroll
        for (int s = 0; s < kSlicesIn; s++) {
          if (stale(words[i][s]) & 1) words[i][s] = load(i, s);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      float x[kSlicesIn], y[kSlicesIn];
#pragma unroll
      for (int s = 0; s < kSlicesIn; s++) {
        const float2 v = open(words[i][s]);
        x[s] = v.x, y[s] = v.y;
      }
      sum[i] = make_float2(sum_of(x), sum_of(y));
    }
  }
};

}  // namespace dpa::kernels::unet1d
