// The arithmetic warps of the resident kernel for one sample: at most kPairs channel pairs a thread, all sizes taken
// from the descriptors. Between two layers a block does nothing but the steps below, in this order, and what can be
// done while the messages are under way is done then.
//
//   prepare   the messages become the GEMM's input: resident_solo_inputs.cuh
//   hold      while they are polled, a warp's first weights of the GEMM, or all of them, go to registers: warp w takes
//             steps w, w + 8, ... of K for all row tiles; so do the addresses that the GEMM and publishing need
//   gemm      the held weights multiply; then the rest, the next step's fragments loading meanwhile
//   publish   the 8 warps' partial sums meet in shared memory, a thread an output word
#pragma once
#include <bit>

#include "kernels/cuda/unet1d/resident_solo_inputs.cuh"

namespace dpa::kernels::unet1d {

template <class Weight, int kPairs, SoloForm kForm>
struct Solo : SoloInputs<Weight, kPairs, kForm> {
  using Base = SoloInputs<Weight, kPairs, kForm>;
  using Math = typename Base::Math;
  using PartialSums = typename Base::PartialSums;
  using Base::a, Base::shared, Base::pipeline, Base::tid, Base::warp, Base::lane, Base::m, Base::k, Base::messages,
      Base::step, Base::phase, Base::film, Base::mark;
  static constexpr bool kWide = Base::kWide, kScaled = sizeof(Weight) == 1;
  static constexpr int kStepBytes = 16 * Base::kElement;

  // Floats of a warp's partial sums.
  __device__ __forceinline__ int share() const { return kBulk ? kSoloShareFloats * kPairs : a.layout.share; }

  template <int kRows, int kColumns>
  struct Fragments {
    typename Math::Raw w[kRows * sizeof(Weight) <= 16 ? kRows : 1];
    typename Math::B x[kColumns];
  };

  // Weights of the first segment in registers before the GEMM's input is there, and where each step's activations will
  // be. Steps of a warp, by its row tiles; where the segment has more, the first ones, which are whole stages.
  static constexpr int kHeldTiles = kBulk ? solo_held_tiles(kPairs, sizeof(Weight)) : 0,
                       kHeldBytes = solo_stages(kPairs) * kStageBytes;
  template <int kRows>
  static constexpr int kHeld = kRows == 1 && kHeldTiles > 8 ? 8 : kHeldTiles / kRows;
  // The steps of short segments, which take no time for others.
  template <int kRows>
  static constexpr int kShort = kRows == 1 ? 2 : 3;
  static constexpr uint32_t kNoBarrier = 1;  // 0 may be one: on chips before Hopper shared memory begins there
  struct HeldWeights {
    typename Math::Raw tiles[kHeldTiles + 1];  // e4m3 is widened when it multiplies
    uint32_t inputs[5];                        // offsets of the steps' activations, two a word
    float2 scale[2];
    // Where the lane's column of activations begins, and where the thread's partial sums go, where it reads those of all
    // warps: addresses in shared memory; where it publishes: a word of a layer's messages.
    uint32_t row, mine, sums, to;
    uint32_t empty = kNoBarrier;  // the lane's stage to give back once they have multiplied: a barrier
  };
  // Whether their stages are given back so late: a stream that waits for no memory gains nothing by it sooner, and
  // nothing waits for the loads of weights before the messages are added up.
  static constexpr bool kReleaseLater = kBulk && kScaled && kPairs == 1;
  // Of all warps' steps those that are held.
  template <int kRows>
  static __device__ __forceinline__ int held_of(int steps) {
    constexpr int kRound = kConsumerWarps * kRows * Math::kBytes;  // bytes of a step of every warp
    constexpr int kPart = kHeld<kRows> * kRound / kStageBytes * kStageBytes / kRound;
    static_assert(kHeld<kRows> * kRound <= kHeldBytes, "the circular buffer has room for what is held");
    return steps <= kHeld<kRows> * kConsumerWarps ? steps : kPart * kConsumerWarps;
  }

  // A thread publishes one row of some columns, or two neighbours: of kRows tiles' rows 2^kUnitLog2 units.
  static constexpr int kUnits = PartialSums::kWordSums;
  template <int kRows>
  static constexpr int kPitch = 16 * kRows + 4;
  template <int kRows>
  static constexpr int kUnitLog2 = std::bit_width(16u * kRows / kUnits) - 1;
  // Where a lane's column of column tile i begins: with 16-bit inputs one load serves two tiles.
  __device__ __forceinline__ uint32_t column_row(const SoloLayer& l, int i) const {
    const int n = i * 8 + (!kWide && (l.shape & 15) > 1 ? lane >> 4 << 3 : 0) + (lane & 7);
    return Base::base + (n < l.columns ? n : 0) * l.stride + Base::lane_part();
  }

  template <int kRows, class Poll>
  __device__ __forceinline__ void hold(const SoloLayer& l, HeldWeights& held, Poll poll) {
    constexpr int kStep = kRows * Math::kBytes, kRound = kConsumerWarps * kStep;  // bytes
    // Computed before the messages are there, and kept: behind them every instruction counts.
    constexpr int kLog2 = kUnitLog2<kRows>;
    const int unit = tid & ((1 << kLog2) - 1), n = tid >> kLog2;
    held.row = ptx::held(column_row(l, 0));
    held.mine = ptx::held(a.layout.partial + 4 * (warp * share() + lane % 4 * 2 * kPitch<kRows> + lane / 4));
    held.sums = ptx::held(a.layout.partial + 4 * (unit * kUnits + n * kPitch<kRows>));
    held.to = ptx::held(k * PartialSums::kStride + (m << kLog2) + unit + n * l.out_stride);
    if constexpr (kScaled) {
      const float* at = a.floats + (l.scale + static_cast<uint32_t>(m * 16 * kRows + (tid * 2 & (16 * kRows - 1))));
      held.scale[0] = ptx::load_constant_2(at);
      held.scale[1] = ptx::load_constant_2(at + (l.steps[1] ? static_cast<uint32_t>(l.channels) : 0u));
    }
    if (Base::kPollAhead) poll();
    if constexpr (kHeld<kRows> == 0) return;
    const int steps = held_of<kRows>(l.steps[0]), stages = (steps * kStep + kStageBytes - 1) / kStageBytes,
              buffer_bytes = pipeline.stages * kStageBytes;
    constexpr int kFirst = kShort<kRows> < kHeld<kRows> ? kShort<kRows> : kHeld<kRows>;
    if (lane < stages) pipeline.wait_ahead(lane);
    __syncwarp();
    const uint32_t tiles = Base::base + a.layout.buffer + lane * Math::kLaneBytes;
    int s = warp, at = pipeline.stage * kStageBytes + warp * kStep;
    const uint32_t input = l.input + l.first[0];
    if (at >= buffer_bytes) at -= buffer_bytes;
#pragma unroll
    for (int i = 0; i < kHeld<kRows>; i++) {
      if (i == kShort<kRows> && steps <= kShort<kRows> * kConsumerWarps) break;
#pragma unroll
      for (int r = 0; r < kRows; r++) held.tiles[i * kRows + r] = Math::load_at(tiles + at + r * Math::kBytes);
      const int real = min(s, steps - 1);  // a warp without this step loads what it does not use
      const uint32_t offset = input + real * kStepBytes + (real * l.steps_inverse >> 16) * l.tap_bytes;
      held.inputs[i / 2] = i % 2 ? held.inputs[i / 2] | offset << 16 : offset;
      s += kConsumerWarps, at += kRound;
      // Less the buffer's length where it is behind its end: else that is a huge number.
      at = static_cast<int>(min(static_cast<uint32_t>(at), static_cast<uint32_t>(at - buffer_bytes)));
    }
    inject_test_delay();
    if constexpr (kReleaseLater) {
      const uint32_t barrier = pipeline.take(lane, stages);
      if (lane < stages) held.empty = barrier;
      return;
    }
    // The stages may be written again as soon as they are given back, and an arrival overtakes loads that nothing waits
    // for: each held tile is used first.
    if constexpr (kHeldTiles > 0) {
      uint32_t seen = 0;
#pragma unroll
      for (int i = 0; i < kFirst * kRows; i++) seen |= reinterpret_cast<const uint32_t&>(held.tiles[i]);
      if (steps > kFirst * kConsumerWarps) {
#pragma unroll
        for (int i = kFirst * kRows; i < kHeld<kRows> * kRows; i++)
          seen |= reinterpret_cast<const uint32_t&>(held.tiles[i]);
      }
      ptx::wait_for(seen);
    }
    pipeline.release(lane, stages);
  }
  template <class Poll>
  __device__ __forceinline__ void hold_any(const SoloLayer& l, HeldWeights& held, Poll poll) {
    // One branch each costs less than a jump by a table.
    const int rows = l.shape >> 4;
    if (rows == 2)
      hold<2>(l, held, poll);
    else if (rows == 1)
      hold<1>(l, held, poll);
    else if (rows == 4)
      hold<4>(l, held, poll);
    else if (kBulk || rows == 8)
      hold<8>(l, held, poll);
    else if constexpr (!kBulk)
      hold<16>(l, held, poll);
  }

  template <int kRows, int kColumns>
  using Sums = typename Math::Sum[kRows][kColumns];

  template <int kRows, int kColumns>
  static __device__ __forceinline__ void reset(typename Math::Sum (&sum)[kRows][kColumns]) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
#pragma unroll
      for (int j = 0; j < kColumns; j++) sum[r][j] = {};
    }
  }

  static __device__ __forceinline__ uint32_t input_of(const HeldWeights& held, int i) {
    return i % 2 ? held.inputs[i / 2] >> 16 : held.inputs[i / 2] & 0xffff;
  }
  // Held steps kBegin to kEnd, as far as this warp has them: the activations of all at once where registers allow.
  template <int kBegin, int kEnd, int kRows, int kColumns>
  __device__ __forceinline__ void multiply_steps(const HeldWeights& held, int count, const uint32_t (&rows)[kColumns],
                                                 Sums<kRows, kColumns>& sum) const {
    constexpr bool kAtOnce = kColumns <= (kWide ? 1 : 2);
    typename Math::B x[kEnd - kBegin + 1][kColumns];
    if constexpr (kAtOnce) {
#pragma unroll
      for (int i = kBegin; i < kEnd; i++) Base::template load_columns<kColumns>(x[i - kBegin], rows, input_of(held, i));
    }
#pragma unroll
    for (int i = kBegin; i < kEnd; i++) {
      if (i >= count) break;
      if constexpr (!kAtOnce) Base::template load_columns<kColumns>(x[i - kBegin], rows, input_of(held, i));
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const typename Math::A tile = Math::widen_raw(held.tiles[i * kRows + r]);
#pragma unroll
        for (int j = 0; j < kColumns; j++) Math::multiply(sum[r][j], tile, x[i - kBegin][j]);
      }
    }
  }
  template <int kRows, int kColumns>
  __device__ __forceinline__ void multiply_held(const HeldWeights& held, int steps, const uint32_t (&rows)[kColumns],
                                                Sums<kRows, kColumns>& sum) const {
    constexpr int kSteps = kHeld<kRows>, kFirst = kShort<kRows> < kSteps ? kShort<kRows> : kSteps;
    if constexpr (kSteps == 0) return;
    const int count = (steps - warp + kConsumerWarps - 1) / kConsumerWarps;
    multiply_steps<0, kFirst, kRows, kColumns>(held, count, rows, sum);
    if constexpr (kFirst < kSteps) {
      if (steps > kFirst * kConsumerWarps) multiply_steps<kFirst, kSteps, kRows, kColumns>(held, count, rows, sum);
    }
  }

  // The steps from round `begin` on: weights are taken in chunks of stages: lane i waits for the chunk's stage i and
  // gives it back, and in between nothing but addresses, loads and GEMMs.
  template <int kRows, int kColumns>
  __device__ __forceinline__ void multiply_rest(const SoloLayer& l, int steps, int first, int begin,
                                                const uint32_t (&rows)[kColumns], Sums<kRows, kColumns>& sum) {
    constexpr int kStep = kRows * Math::kBytes, kWarpsBytes = kConsumerWarps * kStep;  // bytes
    // Stages taken and given back at once: few, so that the stream goes on; by cp.async a good part of the buffer, for
    // stages are smaller, and no weights are held.
    constexpr int kUnit = kWarpsBytes > kStageBytes ? kWarpsBytes / kStageBytes : 1;
    constexpr int kBulkChunk = kUnit > 1 ? kUnit : kScaled ? 1 : 3;
    const int chunk = kBulk || kUnit >= 4     ? kBulkChunk
                      : pipeline.stages >= 12 ? 6
                      : kUnit == 2            ? 2
                                              : 3,
              chunk_iterations = chunk * kStageBytes / kWarpsBytes;
    constexpr bool kAtOnce = kRows * sizeof(Weight) <= 16,
                   kAhead = kRows * sizeof(Weight) <= (kWide ? 16 : 8) && kRows * kColumns < (kBulk   ? kWide ? 8 : 16
                                                                                              : kWide ? 4
                                                                                                      : 8);
    const int iterations = (steps + kConsumerWarps - 1) / kConsumerWarps, ring_bytes = pipeline.stages * kStageBytes;
    const uint8_t* tiles = shared + a.layout.buffer + lane * Math::kLaneBytes;
    int s = warp + begin * kConsumerWarps, at = pipeline.stage * kStageBytes + warp * kStep,
        left = (steps * kStep - begin * kWarpsBytes + kStageBytes - 1) / kStageBytes;
    if (at >= ring_bytes) at -= ring_bytes;
    first += l.input;
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
    for (int base = begin; base < iterations; base += chunk_iterations) {
      const int stages = min(chunk, left);
      left -= stages;
      if (lane < stages) pipeline.wait_ahead(lane);
      __syncwarp();
      int n = min(chunk_iterations, iterations - base);
      if (base + n == iterations && s + (n - 1) * kConsumerWarps >= steps)
        n--;  // the last round has no step for this warp
      if constexpr (kAhead) {
        if (n > 0) {
          Fragments<kRows, kColumns> even, odd;
          load(even);
#pragma unroll 1
          for (; n > 2; n -= 2) {
            load(odd);
            apply(even);
            load(even);
            apply(odd);
          }
          if (n > 1) load(odd);
          apply(even);
          if (n > 1) apply(odd);
        }
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
  }

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
  __device__ __forceinline__ void multiply(const SoloLayer& l, const HeldWeights& held, int layer) {
    uint32_t rows[kColumns] = {held.row};
#pragma unroll
    for (int i = 1; i < kColumns; i++) rows[i] = column_row(l, i);
    // Of the columns that a thread publishes; where slices are merged, their number is of the shape.
    constexpr int kApart = kThreads >> kUnitLog2<kRows>,
                  kRounds = kBulk ? (kPairs + kUnits - 1) / kUnits : (kColumns * 8 + kApart - 1) / kApart;
    const uint32_t apart = kApart * l.out_stride;
    uint32_t segment = 0;  // bytes to its partial sums
    Sums<kRows, kColumns> sum = {};
    int steps = l.steps[0], done = held_of<kRows>(steps);
    multiply_held<kRows, kColumns>(held, done, rows, sum);
    if constexpr (kReleaseLater) {
      __syncwarp();
      if (held.empty != kNoBarrier) ptx::barrier_arrive(held.empty);
    }
    // A second segment that is a residual's is not needed before the next layer but one: the first one's sums go ahead.
#pragma unroll 1
    for (int s = 0; steps; s++) {
      if constexpr (kHeldTiles == 0) reset(sum);
      if (done < steps)
        multiply_rest<kRows, kColumns>(l, steps, s ? l.first[1] : l.first[0], done / kConsumerWarps, rows, sum);
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
      if constexpr (kHeldTiles > 0) reset(sum);
    }
  }

  template <int kRows, int kColumns>
  static constexpr bool kHasShape = solo_has_shape(kBulk, kWide, kPairs, kRows, kColumns);
  // Runs the GEMM if it has this shape and there is code for it.
  template <int kRows, int kColumns>
  __device__ __forceinline__ bool try_shape(const SoloLayer& l, const HeldWeights& held, int layer) {
    if constexpr (kHasShape<kRows, kColumns>) {
      if (l.shape != (kRows << 4 | kColumns)) return false;
      multiply<kRows, kColumns>(l, held, layer);
      return true;
    }
    return false;
  }
  __device__ __forceinline__ void gemm(const SoloLayer& l, const HeldWeights& held, int layer) {
    // The wider a layer the more often it comes. One branch each costs less than a jump by a table.
    try_shape<4, 1>(l, held, layer) || try_shape<2, 1>(l, held, layer) || try_shape<1, 2>(l, held, layer) ||
        try_shape<1, 1>(l, held, layer) || try_shape<8, 1>(l, held, layer) || try_shape<2, 2>(l, held, layer) ||
        try_shape<1, 4>(l, held, layer) || try_shape<4, 2>(l, held, layer) || try_shape<2, 4>(l, held, layer) ||
        try_shape<1, 6>(l, held, layer) || try_shape<1, 8>(l, held, layer) || try_shape<16, 1>(l, held, layer);
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
        Base::prepare(from, to, i, tail, [&](auto poll) { hold_any(to, held, poll); });
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
