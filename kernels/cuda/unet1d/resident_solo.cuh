// The arithmetic warps of the resident kernel for one sample: at most kPairs channel pairs a thread, all sizes taken
// from the descriptors. Between two layers a block does nothing but the steps below, in this order, and what can be
// done while the messages are under way is done then.
//
//   prepare   the messages become the GEMM's input: resident_solo_inputs.cuh
//   hold      while they are polled, a warp's first weights of the GEMM, or all of them, go to registers, and so do the
//             addresses that the GEMM and publishing need: resident_solo_weights.cuh
//   gemm      the held weights multiply; then the rest
//   publish   the 8 warps' partial sums meet in shared memory, a thread an output word
#pragma once
#include "kernels/cuda/unet1d/resident_solo_weights.cuh"

namespace dpa::kernels::unet1d {

template <class Weight, int kPairs, SoloForm kForm>
struct Solo : SoloWeights<Weight, kPairs, kForm> {
  using Base = SoloWeights<Weight, kPairs, kForm>;
  using Math = typename Base::Math;
  using PartialSums = typename Base::PartialSums;
  using HeldWeights = typename Base::HeldWeights;
  using Base::a, Base::shared, Base::tid, Base::warp, Base::lane, Base::messages, Base::step, Base::phase, Base::film,
      Base::mark, Base::share, Base::reset, Base::column_row, Base::kUnits;
  static constexpr bool kWide = Base::kWide, kScaled = Base::kScaled;
  template <int kRows>
  static constexpr int kPitch = Base::template kPitch<kRows>;
  template <int kRows>
  static constexpr int kUnitLog2 = Base::template kUnitLog2<kRows>;
  template <int kRows, int kColumns>
  using Sums = typename Base::template Sums<kRows, kColumns>;

  template <int kRows, int kColumns>
  __device__ __forceinline__ void store_sums(const SoloLayer& l, const Sums<kRows, kColumns>& sum, uint32_t out) const {
    float* mine = reinterpret_cast<float*>(shared + out);
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (j * 8 + lane % 4 * 2 + (e & 1) < l.columns) {
#pragma unroll
          for (int i = 0; i < kRows; i++)
            mine[(j * 8 + (e & 1)) * kPitch<kRows> + i * 16 + (e >> 1) * 8] = sum[i][j][e];
        }
      }
    }
  }

  // The word to publish: the 8 warps' sums of a row, or of two rows, times their scales where weights have any.
  __device__ __forceinline__ uint32_t message(const float* shares, float2 scale) const {
    float x[kConsumerWarps];
    if constexpr (kWide) {
#pragma unroll
      for (int w = 0; w < kConsumerWarps; w++) x[w] = shares[w * share()];
      return __float_as_uint(sum_of(x));
    } else {
      float y[kConsumerWarps];
#pragma unroll
      for (int w = 0; w < kConsumerWarps; w++) {
        const float2 v = *reinterpret_cast<const float2*>(shares + w * share());
        x[w] = v.x, y[w] = v.y;
      }
      float2 sum = make_float2(sum_of(x), sum_of(y));
      if constexpr (kScaled) sum.x *= scale.x, sum.y *= scale.y;
      return pack_pair<typename Math::Activation>(sum.x, sum.y);
    }
  }

  template <int kRows, int kColumns>
  __device__ __forceinline__ void multiply(const SoloLayer& l, HeldWeights& held, int layer) {
    uint32_t rows[kColumns] = {held.row};
#pragma unroll
    for (int i = 1; i < kColumns; i++) rows[i] = column_row(l, i);
    // Of the columns that a thread publishes; where slices are merged, their number is of the shape.
    constexpr int kApart = kThreads >> kUnitLog2<kRows>,
                  kRounds = kBulk ? (kPairs + kUnits - 1) / kUnits : (kColumns * 8 + kApart - 1) / kApart;
    const uint32_t apart = kApart * l.out_stride;
    uint32_t segment = 0;  // bytes to its partial sums
    Sums<kRows, kColumns> sum = {};
    int steps = l.steps[0], done = 0;
    if constexpr (kBulk) done = Base::template multiply_first<kRows, kColumns>(l, held, rows, sum);
      // A second segment that is a residual's is not needed before the next layer but one: the first one's sums go ahead.
#pragma unroll 1
    for (int s = 0; steps; s++) {
      if constexpr (kBulk) {
        if (done < steps)
          Base::template multiply_rest<kRows, kColumns>(l, steps, s ? l.first[1] : l.first[0], done / kConsumerWarps,
                                                        rows, sum);
      } else {
        Base::template multiply_loaded<kRows, kColumns>(l, layer + 1, held, s, steps, rows, sum);
      }
      store_sums<kRows, kColumns>(l, sum, held.mine + segment);
      if (s == 0) mark(layer, kMultiplied);
      sync_consumers();
      inject_test_delay();
      const float* sums = reinterpret_cast<const float*>(shared + held.sums + segment);
      uint32_t* to = messages + (held.to + (s ? l.out[1] : l.out[0]));
#pragma unroll
      for (int i = 0; i < kRounds; i++) {
        if ((tid >> kUnitLog2<kRows>)+i * kApart < l.columns)
          ptx::store_message_word<void>(
              to + i * apart,
              (message(sums + i * kApart * kPitch<kRows>, s ? held.scale[1] : held.scale[0]) & ~1u) | phase);
      }
      if (s == 0) mark(layer, kPublished);
      steps = s ? 0 : l.steps[1], done = 0;
      if constexpr (kBulk)
        segment += kConsumerWarps * share() * 4;
      else if (steps)
        sync_consumers();  // there is room for one segment's sums
      reset(sum);
    }
  }

  template <int kRows, int kColumns>
  static constexpr bool kHasShape = solo_has_shape(kBulk, kWide, kPairs, kRows, kColumns);
  // Runs the GEMM if it has this shape and there is code for it.
  template <int kRows, int kColumns>
  __device__ __forceinline__ bool try_shape(const SoloLayer& l, HeldWeights& held, int layer) {
    if constexpr (kHasShape<kRows, kColumns>) {
      if (l.shape != (kRows << 4 | kColumns)) return false;
      multiply<kRows, kColumns>(l, held, layer);
      return true;
    }
    return false;
  }
  __device__ __forceinline__ void gemm(const SoloLayer& l, HeldWeights& held, int layer) {
    // The wider a layer the more often it comes. One branch each costs less than a jump by a table.
    try_shape<4, 1>(l, held, layer) || try_shape<2, 1>(l, held, layer) || try_shape<1, 2>(l, held, layer) ||
        try_shape<1, 1>(l, held, layer) || try_shape<8, 1>(l, held, layer) || try_shape<2, 2>(l, held, layer) ||
        try_shape<1, 4>(l, held, layer) || try_shape<4, 2>(l, held, layer) || try_shape<2, 3>(l, held, layer) ||
        try_shape<2, 4>(l, held, layer) || try_shape<1, 6>(l, held, layer) || try_shape<1, 8>(l, held, layer) ||
        try_shape<16, 1>(l, held, layer);
  }

  __device__ __forceinline__ void run() {
    const SoloLayer* layers = reinterpret_cast<const SoloLayer*>(shared + a.layout.descriptors);
    const int count = a.layout.count;
    for (step = 0; step < a.steps; step++) {
      phase = (step & 1) ^ 1;
      film = a.film_step + step * a.film_step_stride;
      asm volatile("" : "+l"(film));  // or it is computed in every layer
      for (int i = 0; i <= count; i++) {
        const bool tail = i == count;
        if constexpr (kWide || kPairs > 1) {  // registers are short: nothing of a shape is computed before the loop
          lane = static_cast<int>(ptx::held(lane)), warp = static_cast<int>(ptx::held(warp));
          tid = static_cast<int>(ptx::held(tid));
        }
        const SoloLayer from = layers[i], to = layers[tail ? i : i + 1];  // in registers, as far as they are needed
        HeldWeights held;
        if constexpr (!kBulk) {
          if (!tail) Base::load_any(to, i + 1, held);
        }
        Base::prepare(from, to, i, tail, [&](auto poll) { Base::hold_any(to, held, poll); });
        constexpr bool kKeepLater = !kWide && kPairs == 1;  // else registers are short
        if (!kKeepLater) Base::keep(from);
        if (!tail) gemm(to, held, i);
        if (kKeepLater) Base::keep(from);
      }
      Base::tail();
      mark(count, kPublished);
    }
  }
};

}  // namespace dpa::kernels::unet1d
