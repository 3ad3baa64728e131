// The arithmetic warps of the resident kernel for one sample: at most kPairs channel pairs a thread, all sizes taken
// from the descriptors. Between two layers a block does nothing but the steps below, in this order, and what can be
// done while the messages are under way is done then.
//
//   prepare   the messages become the GEMM's input: resident_solo_inputs.cuh
//   gemm      warp w takes steps w, w + 8, ... of K for all row tiles; the next step's fragments load while this one's
//             multiply
//   publish   the 8 warps' partial sums meet in shared memory, a thread an output word
#pragma once
#include "kernels/cuda/unet1d/resident_solo_inputs.cuh"

namespace dpa::kernels::unet1d {

template <class Weight, int kPairs, bool kRecord>
struct Solo : SoloInputs<Weight, kPairs, kRecord> {
  using Base = SoloInputs<Weight, kPairs, kRecord>;
  using Math = typename Base::Math;
  using PartialSums = typename Base::PartialSums;
  using Base::a, Base::shared, Base::pipeline, Base::tid, Base::warp, Base::lane, Base::m, Base::k, Base::step,
      Base::phase, Base::film, Base::mark;
  static constexpr bool kWide = Base::kWide, kScaled = sizeof(Weight) == 1;
  static constexpr int kStepBytes = 16 * Base::kElement, kShare = kSoloShareFloats * kPairs;

  template <int kRows, int kColumns>
  struct Fragments {
    typename Math::Raw w[kRows * sizeof(Weight) <= 16 ? kRows : 1];
    typename Math::B x[kColumns];
  };

  // One segment: this warp's steps of K, all row tiles. Weights are taken in chunks of stages: lane i waits for the
  // chunk's stage i and gives it back, and in between nothing but addresses, loads and GEMMs.
  template <int kRows, int kColumns>
  __device__ __forceinline__ void segment(const SoloLayer& l, int steps, int first, int& waited,
                                          const uint32_t (&rows)[kColumns], float* out) {
    constexpr int kStep = kRows * Math::kBytes, kWarpsBytes = kConsumerWarps * kStep;  // bytes
    // Stages taken and given back at once: few, so that the stream goes on; of e4m3, whose streams have time, all of a
    // layer where they are not most of the circular buffer.
    constexpr int kLeast = kWarpsBytes > 2 * kStageBytes ? kWarpsBytes / kStageBytes
                           : kWarpsBytes > kStageBytes   ? 2
                           : kScaled                     ? 1
                                                         : 3;
    const int chunk = kScaled && l.stages * 2 <= pipeline.stages ? l.stages : kLeast;
    const int chunk_iterations = chunk * kStageBytes / kWarpsBytes;
    constexpr bool kAtOnce = kRows * sizeof(Weight) <= 16,
                   kAhead = kRows * sizeof(Weight) <= (kWide ? 16 : 8) && (!kWide || kRows * kColumns < 8);
    const int iterations = (steps + kConsumerWarps - 1) / kConsumerWarps, ring_bytes = pipeline.stages * kStageBytes;
    const uint8_t* tiles = shared + a.layout.buffer + lane * Math::kLaneBytes;
    typename Math::Sum sum[kRows][kColumns];
    int s = warp, at = pipeline.stage * kStageBytes + warp * kStep,
        left = (steps * kStep + kStageBytes - 1) / kStageBytes;
    if (at >= ring_bytes) at -= ring_bytes;
    const uint8_t* now = tiles;
    auto load = [&](Fragments<kRows, kColumns>& f) {
      inject_test_delay();
      now = tiles + at;
      if constexpr (kAtOnce) {
#pragma unroll
        for (int i = 0; i < kRows; i++) f.w[i] = Math::load_raw(now + i * Math::kBytes, 0, true);
      }
      Base::template load_columns<kColumns>(f.x, rows,
                                            first + s * kStepBytes + (s * l.steps_inverse >> 16) * l.tap_bytes);
      s += kConsumerWarps;
      at += kWarpsBytes;
      if (at >= ring_bytes) at -= ring_bytes;
    };
    auto apply = [&](const Fragments<kRows, kColumns>& f) {
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        if constexpr (!kAtOnce) {
          if (i % 2 == 0) asm volatile("" ::: "memory");  // not more than two tiles at a time: registers are short
        }
        const typename Math::A w =
            Math::widen_raw(kAtOnce ? f.w[kAtOnce ? i : 0] : Math::load_raw(now + i * Math::kBytes, 0, true));
#pragma unroll
        for (int j = 0; j < kColumns; j++) Math::multiply(sum[i][j], w, f.x[j]);
      }
    };
#pragma unroll 1
    for (int base = 0; base < iterations; base += chunk_iterations) {
      const int stages = min(chunk, left);
      left -= stages;
      if (waited < stages) {
        if (lane < stages) pipeline.wait_ahead(lane);
        __syncwarp();
        waited = stages;
      }
      waited -= stages;
      int n = min(chunk_iterations, iterations - base);
      if (base + n == iterations && s + (n - 1) * kConsumerWarps >= steps)
        n--;  // the last round has no step for this warp
      if constexpr (kAhead) {
        Fragments<kRows, kColumns> even, odd;
        if (n > 0) load(even);
#pragma unroll 1
        for (; n > 1; n -= 2) {
          load(odd);
          apply(even);
          if (n > 2) load(even);
          apply(odd);
        }
        if (n > 0) apply(even);
      } else {
#pragma unroll 1
        for (; n > 0; n--) {
          Fragments<kRows, kColumns> f;
          load(f);
          apply(f);
        }
      }
      pipeline.release(lane, stages);
    }
    constexpr int kPitch = 16 * kRows + 4;
    float* mine = out + warp * kShare + lane % 4 * 2 * kPitch + lane / 4;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (j * 8 + lane % 4 * 2 + (e & 1) < l.columns) {
#pragma unroll
          for (int i = 0; i < kRows; i++) mine[(j * 8 + (e & 1)) * kPitch + i * 16 + (e >> 1) * 8] = sum[i][j][e];
        }
      }
    }
  }

  // The word to publish: the 8 warps' sums of a row, or of two rows, times their scales where weights have any.
  __device__ __forceinline__ uint32_t message(const float* shares, float2 scale) const {
    float x[kConsumerWarps];
    if constexpr (kWide) {
#pragma unroll
      for (int w = 0; w < kConsumerWarps; w++) x[w] = shares[w * kShare];
      return __float_as_uint(sum_of(x));
    } else {
      float y[kConsumerWarps];
#pragma unroll
      for (int w = 0; w < kConsumerWarps; w++) {
        const float2 v = *reinterpret_cast<const float2*>(shares + w * kShare);
        x[w] = v.x, y[w] = v.y;
      }
      float2 sum = make_float2(sum_of(x), sum_of(y));
      if constexpr (kScaled) sum.x *= scale.x, sum.y *= scale.y;
      return pack_pair<typename Math::Activation>(sum.x, sum.y);
    }
  }

  template <int kRows, int kColumns>
  __device__ __forceinline__ void multiply(const SoloLayer& l, int waited, int layer) {
    uint32_t rows[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; i++) {  // with 16-bit inputs one load serves two column tiles
      const int n = i * 8 + (!kWide && kColumns > 1 && i % 2 == 0 ? lane >> 4 << 3 : 0) + (lane & 7);
      rows[i] = Base::base + l.input + (n < l.columns ? n : 0) * l.stride + Base::lane_part();
    }
    constexpr int kLog2 = kRows == 1 ? 4 : kRows == 2 ? 5 : kRows == 4 ? 6 : 7, kPitch = 16 * kRows + 4;
    // A thread publishes one row of some columns, or two neighbours.
    constexpr int kUnits = PartialSums::kWordSums, kUnitLog2 = kLog2 - (kUnits - 1);
    const int unit = tid & ((1 << kUnitLog2) - 1), row = unit * kUnits, n0 = tid >> kUnitLog2;
    float* partial = Base::floats_at(a.layout.partial);
    const int second = l.steps[1];
    float2 scale[2] = {};
    if constexpr (kScaled) {
      const float* at = a.floats + (l.scale + static_cast<uint32_t>((m << kLog2) + row));
      scale[0] = ptx::load_constant_2(at);
      if (second) scale[1] = ptx::load_constant_2(at + static_cast<uint32_t>(l.channels));
    }
#pragma unroll 1
    for (int s = 0; s < (second ? 2 : 1); s++) {
      segment<kRows, kColumns>(l, s ? second : l.steps[0], s ? l.first[1] : l.first[0], waited, rows,
                               partial + s * kConsumerWarps * kShare);
    }
    mark(layer, kMultiplied);
    sync_consumers();
    inject_test_delay();
    const uint32_t out = k * PartialSums::kStride + (m << kUnitLog2) + unit + n0 * l.out_stride,
                   apart = (kThreads >> kUnitLog2) * l.out_stride;
#pragma unroll 1
    for (int s = 0; s < (second ? 2 : 1); s++) {
      const float* from = partial + s * kConsumerWarps * kShare + row;
      uint32_t* to = a.messages + (out + (s ? l.out[1] : l.out[0]));
#pragma unroll
      for (int i = 0; i < (kPairs + kUnits - 1) / kUnits; i++) {
        const int n = n0 + i * (kThreads >> kUnitLog2);
        if (n < l.columns)
          ptx::store_message_word(to + i * apart, (message(from + n * kPitch, s ? scale[1] : scale[0]) & ~1u) | phase);
      }
    }
    mark(layer, kPublished);
  }

  __device__ __forceinline__ void gemm(const SoloLayer& l, int waited, int layer) {
    switch (l.shape) {
      case 0x11: multiply<1, 1>(l, waited, layer); break;
      case 0x12: multiply<1, 2>(l, waited, layer); break;
      case 0x21: multiply<2, 1>(l, waited, layer); break;
      case 0x22:
        if constexpr (kPairs > 1) multiply<2, 2>(l, waited, layer);
        break;
      case 0x41: multiply<4, 1>(l, waited, layer); break;
      case 0x14:
        if constexpr (kPairs > 1) multiply<1, 4>(l, waited, layer);
        break;
      case 0x18:
        if constexpr (kPairs > 2) multiply<1, 8>(l, waited, layer);
        break;
      case 0x24:
        if constexpr (kPairs > 2) multiply<2, 4>(l, waited, layer);
        break;
      case 0x42:
        if constexpr (kPairs > 2) multiply<4, 2>(l, waited, layer);
        break;
      default: multiply<8, 1>(l, waited, layer); break;
    }
  }

  __device__ __forceinline__ void run() {
    const SoloLayer* layers = reinterpret_cast<const SoloLayer*>(shared + a.layout.descriptors);
    const int count = a.layout.count;
    for (step = 0; step < a.steps; step++) {
      phase = (step & 1) ^ 1;
      film = a.film_step + step * a.film_step_stride;
      SoloLayer from = layers[0];  // in registers
      for (int i = 0; i <= count; i++) {
        const bool tail = i == count;
        const SoloLayer to = layers[tail ? i : i + 1];
        const int waited = Base::prepare(from, to, i, tail);
        if (!tail) gemm(to, waited, i);
        from = to;
      }
      Base::tail(1);
      mark(count, kPublished);
    }
  }
};

}  // namespace dpa::kernels::unet1d
