// The weights of the one-sample kernel's GEMMs. Warp w takes steps w, w + 8, ... of K for all row tiles; its first steps, or
// all, are in registers before the messages are there, which become the GEMM's input.
//
//   on Hopper   `hold` takes them out of the circular buffer (resident_kernel.cuh) while the messages are polled; what is
//               not held follows from there, stage by stage
//   elsewhere   a layer begins by loading them from memory past L1, some 80 KB of a block under way; a step that has
//               multiplied makes room for a later one
#pragma once
#include <bit>

#include "kernels/cuda/unet1d/resident_solo_inputs.cuh"

namespace dpa::kernels::unet1d {

template <class Weight, int kPairs, SoloForm kForm>
struct SoloWeights : SoloInputs<Weight, kPairs, kForm> {
  using Base = SoloInputs<Weight, kPairs, kForm>;
  using Math = typename Base::Math;
  using PartialSums = typename Base::PartialSums;
  using Base::a, Base::shared, Base::pipeline, Base::tid, Base::warp, Base::lane, Base::m, Base::k;
  static constexpr bool kWide = Base::kWide, kScaled = sizeof(Weight) == 1;
  static constexpr int kStepBytes = 16 * Base::kElement;

  uint64_t policy = kBulk ? 0 : ptx::evict_first_but_policy(a.layout.kept_part);  // of loads from memory

  // Floats of a warp's partial sums.
  __device__ __forceinline__ int share() const { return kBulk ? kSoloShareFloats * kPairs : a.layout.share; }

  // Weights of the first segment in registers before the GEMM's input is there, and where each step's activations will
  // be. Steps of a warp, by its row tiles; where the segment has more, the first ones, on Hopper whole stages.
  static constexpr int kHeldTiles = solo_held_tiles(kBulk, kPairs, sizeof(Weight)),
                       kHeldBytes = solo_stages(kPairs) * kStageBytes;
  static constexpr int kMostHeld = 10;
  template <int kRows>
  static constexpr int kHeld = kHeldTiles / kRows < (kRows == 1 ? 8 : kMostHeld) ? kHeldTiles / kRows
                               : kRows == 1                                      ? 8
                                                                                 : kMostHeld;
  // The steps of short segments, which take no time for others.
  template <int kRows>
  static constexpr int kShort = kRows == 1 ? 2 : 3;
  static constexpr uint32_t kNoBarrier = 1;  // no barrier is at an odd address
  struct HeldWeights {
    typename Math::Raw tiles[kHeldTiles];  // e4m3 is widened when it multiplies
    uint32_t inputs[kMostHeld / 2];        // offsets of the steps' activations, two a word
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

  // Where the activations of a segment's step will be.
  __device__ __forceinline__ uint32_t input_at(const SoloLayer& l, int segment, int s) const {
    return l.input + (segment ? l.first[1] : l.first[0]) + s * kStepBytes + (s * l.steps_inverse >> 16) * l.tap_bytes;
  }

  // On Hopper: the first tiles out of the circular buffer.
  template <int kRows>
  __device__ __forceinline__ void take_held(const SoloLayer& l, HeldWeights& held) {
    constexpr int kStep = kRows * Math::kBytes, kRound = kConsumerWarps * kStep;  // bytes
    const int steps = held_of<kRows>(l.steps[0]), stages = (steps * kStep + kStageBytes - 1) / kStageBytes,
              buffer_bytes = pipeline.stages * kStageBytes;
    constexpr int kFirst = kShort<kRows> < kHeld<kRows> ? kShort<kRows> : kHeld<kRows>;
    if (lane < stages) pipeline.wait_ahead(lane);
    __syncwarp();
    const uint32_t tiles = Base::base + a.layout.buffer + lane * Math::kLaneBytes;
    int s = warp, at = pipeline.stage * kStageBytes + warp * kStep;
    if (at >= buffer_bytes) at -= buffer_bytes;
#pragma unroll
    for (int i = 0; i < kHeld<kRows>; i++) {
      if (i == kShort<kRows> && steps <= kShort<kRows> * kConsumerWarps) break;
#pragma unroll
      for (int r = 0; r < kRows; r++) held.tiles[i * kRows + r] = Math::load_at(tiles + at + r * Math::kBytes);
      const uint32_t offset = input_at(l, 0, min(s, steps - 1));  // a warp without this step loads what it does not use
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
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < kFirst * kRows; i++) seen |= Math::word_of_each_load(held.tiles[i]);
    if (steps > kFirst * kConsumerWarps) {
#pragma unroll
      for (int i = kFirst * kRows; i < kHeld<kRows> * kRows; i++) seen |= Math::word_of_each_load(held.tiles[i]);
    }
    ptx::wait_for(seen);
    pipeline.release(lane, stages);
  }
  // Elsewhere: a segment's tiles in memory, for a lane. Where slices are merged, a step's rows are of several.
  struct Source {
    const uint8_t* from;
    uint32_t apart;  // bytes from a slice's rows of a step to the next slice's, less those rows
  };
  template <int kRows>
  __device__ __forceinline__ Source source(int layer, int segment, int steps) const {
    const int merged = a.layout.merged_log2;
    const uint32_t slice = static_cast<uint32_t>(steps) * (kRows * Math::kBytes) >> merged;
    return {a.weights + a.layout.weights[layer].from[segment] +
                static_cast<int64_t>((m << merged) * kSlicesIn + k) * slice + lane * Math::kLaneBytes,
            slice * kSlicesIn - (kRows * Math::kBytes >> merged)};
  }
  template <int kRows>
  static constexpr int kRowsLog2 = std::bit_width(static_cast<unsigned>(kRows)) - 1;
  // Loads step `s` to the place of the held step i.
  template <int kRows>
  __device__ __forceinline__ void load_step(HeldWeights& held, int i, const Source& from, int s) const {
    const int merged = a.layout.merged_log2;
    const uint8_t* at = from.from + static_cast<uint32_t>(s) * static_cast<uint32_t>(kRows * Math::kBytes >> merged);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const uint32_t others = merged ? (r >> (kRowsLog2<kRows> - merged)) * from.apart : 0;
      held.tiles[i * kRows + r] = Math::load_at(at + r * Math::kBytes + others, policy);
    }
  }
  // Of `steps` those of this warp.
  __device__ __forceinline__ int own(int steps) const { return (steps - warp + kConsumerWarps - 1) / kConsumerWarps; }
  // Loads a warp's first steps.
  template <int kRows>
  __device__ __forceinline__ void load_steps(HeldWeights& held, int layer, int segment, int steps) const {
    const Source from = source<kRows>(layer, segment, steps);
    const int count = own(steps);
#pragma unroll
    for (int i = 0; i < kHeld<kRows>; i++) {
      if (i >= count) break;
      load_step<kRows>(held, i, from, warp + i * kConsumerWarps);
    }
  }
  // Calls `f` with a layer's row tiles. One branch each costs less than a jump by a table.
  template <class F>
  static __device__ __forceinline__ void with_rows(const SoloLayer& l, F f) {
    const int rows = l.shape >> 4;
    if (rows == 2)
      f(std::integral_constant<int, 2>());
    else if (rows == 1)
      f(std::integral_constant<int, 1>());
    else if (rows == 4)
      f(std::integral_constant<int, 4>());
    else if (kBulk || rows == 8)
      f(std::integral_constant<int, 8>());
    else if constexpr (!kBulk)
      f(std::integral_constant<int, 16>());
  }
  __device__ __forceinline__ void load_any(const SoloLayer& l, int layer, HeldWeights& held) const {
    with_rows(l, [&](auto rows) { load_steps<rows.value>(held, layer, 0, l.steps[0]); });
  }
  // The same of the steps that are held from round `done` on.
  template <int kRows>
  __device__ __forceinline__ void find_inputs(const SoloLayer& l, int segment, int done, int steps,
                                              HeldWeights& held) const {
#pragma unroll
    for (int i = 0; i < kHeld<kRows>; i++) {
      if (i == kShort<kRows> && steps <= (done + kShort<kRows>)*kConsumerWarps) break;
      const uint32_t offset = input_at(l, segment, min(warp + (done + i) * kConsumerWarps, steps - 1));
      held.inputs[i / 2] = i % 2 ? held.inputs[i / 2] | offset << 16 : offset;
    }
  }
  template <int kRows, class Poll>
  __device__ __forceinline__ void hold(const SoloLayer& l, HeldWeights& held, Poll poll) {
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
    if constexpr (kBulk)
      take_held<kRows>(l, held);
    else
      find_inputs<kRows>(l, 0, 0, l.steps[0], held);
  }
  template <class Poll>
  __device__ __forceinline__ void hold_any(const SoloLayer& l, HeldWeights& held, Poll poll) {
    with_rows(l, [&](auto rows) { hold<rows.value>(l, held, poll); });
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
  // Not on Hopper: of which segment a step is that takes the place of one that has multiplied; rounds before the held ones.
  struct Later {
    int layer, segment, steps, done;
  };
  // Held steps kBegin to kEnd, as far as this warp has them: the activations of all at once where registers allow.
  template <int kBegin, int kEnd, int kRows, int kColumns>
  __device__ __forceinline__ void multiply_steps(HeldWeights& held, int count, const Later& later,
                                                 const uint32_t (&rows)[kColumns], Sums<kRows, kColumns>& sum) const {
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
      if constexpr (!kBulk) {
        if (i + kHeld<kRows> < count)
          load_step<kRows>(held, i, source<kRows>(later.layer, later.segment, later.steps),
                           warp + (later.done + i + kHeld<kRows>)*kConsumerWarps);
      }
    }
  }
  // A warp's `count` steps, or as many of them as are held.
  template <int kRows, int kColumns>
  __device__ __forceinline__ void multiply_held(HeldWeights& held, int count, const Later& later,
                                                const uint32_t (&rows)[kColumns], Sums<kRows, kColumns>& sum) const {
    constexpr int kSteps = kHeld<kRows>, kFirst = kShort<kRows> < kSteps ? kShort<kRows> : kSteps;
    multiply_steps<0, kFirst, kRows, kColumns>(held, count, later, rows, sum);
    if constexpr (kFirst < kSteps) {
      if (count > kFirst) multiply_steps<kFirst, kSteps, kRows, kColumns>(held, count, later, rows, sum);
    }
  }

  // On Hopper: the steps from round `begin` on. Weights are taken in chunks of stages: lane i waits for the chunk's stage i
  // and gives it back, and in between nothing but addresses, loads and GEMMs.
  template <int kRows, int kColumns>
  __device__ __forceinline__ void multiply_rest(const SoloLayer& l, int steps, int first, int begin,
                                                const uint32_t (&rows)[kColumns], Sums<kRows, kColumns>& sum) {
    constexpr int kStep = kRows * Math::kBytes, kWarpsBytes = kConsumerWarps * kStep;  // bytes
    // Stages taken and given back at once: few, so that the stream goes on.
    constexpr int kUnit = kWarpsBytes > kStageBytes ? kWarpsBytes / kStageBytes : 1;
    constexpr int kChunk = kUnit > 1 ? kUnit : kScaled ? 1 : 3, kIterations = kChunk * kStageBytes / kWarpsBytes;
    constexpr bool kAtOnce = kRows * sizeof(Weight) <= 16;  // all rows' weights of a step
    const int iterations = (steps + kConsumerWarps - 1) / kConsumerWarps, buffer_bytes = pipeline.stages * kStageBytes;
    const uint8_t* tiles = shared + a.layout.buffer + lane * Math::kLaneBytes;
    int s = warp + begin * kConsumerWarps, at = pipeline.stage * kStageBytes + warp * kStep,
        left = (steps * kStep - begin * kWarpsBytes + kStageBytes - 1) / kStageBytes;
    if (at >= buffer_bytes) at -= buffer_bytes;
    first += l.input;
#pragma unroll 1
    for (int base = begin; base < iterations; base += kIterations) {
      const int stages = min(kChunk, left);
      left -= stages;
      if (lane < stages) pipeline.wait_ahead(lane);
      __syncwarp();
      int n = min(kIterations, iterations - base);
      if (base + n == iterations && s + (n - 1) * kConsumerWarps >= steps)
        n--;  // the last round has no step for this warp
#pragma unroll 1
      for (; n > 0; n--) {
        inject_test_delay();
        const uint8_t* now = tiles + at;
        typename Math::Raw w[kAtOnce ? kRows : 1];
        typename Math::B x[kColumns];
        if constexpr (kAtOnce) {
#pragma unroll
          for (int i = 0; i < kRows; i++) w[i] = Math::load_raw(now + i * Math::kBytes, 0, true);
        }
        Base::template load_columns<kColumns>(x, rows,
                                              first + s * kStepBytes + (s * l.steps_inverse >> 16) * l.tap_bytes);
#pragma unroll
        for (int i = 0; i < kRows; i++) {
          if constexpr (!kAtOnce) {
            if (i % 2 == 0) asm volatile("" ::: "memory");  // not more than two tiles at a time: registers are short
          }
          const typename Math::A tile =
              Math::widen_raw(kAtOnce ? w[kAtOnce ? i : 0] : Math::load_raw(now + i * Math::kBytes, 0, true));
#pragma unroll
          for (int j = 0; j < kColumns; j++) Math::multiply(sum[i][j], tile, x[j]);
        }
        s += kConsumerWarps;
        at += kWarpsBytes;
        if (at >= buffer_bytes) at -= buffer_bytes;
      }
      pipeline.release(lane, stages);
    }
  }

  // On Hopper: the first segment's steps that are held; returns how many of all warps' are.
  template <int kRows, int kColumns>
  __device__ __forceinline__ int multiply_first(const SoloLayer& l, HeldWeights& held, const uint32_t (&rows)[kColumns],
                                                Sums<kRows, kColumns>& sum) const {
    const int done = held_of<kRows>(l.steps[0]);
    multiply_held<kRows, kColumns>(held, own(done), {}, rows, sum);
    if constexpr (kReleaseLater) {
      __syncwarp();
      if (held.empty != kNoBarrier) ptx::barrier_arrive(held.empty);
    }
    return done;
  }

  // Elsewhere: all of a segment's steps, whose first ones are held; what has multiplied makes room for a later step.
  template <int kRows, int kColumns>
  __device__ __forceinline__ void multiply_loaded(const SoloLayer& l, int layer, HeldWeights& held, int segment,
                                                  int steps, const uint32_t (&rows)[kColumns],
                                                  Sums<kRows, kColumns>& sum) const {
    constexpr int kSteps = kHeld<kRows>;
    const int count = own(steps);
#pragma unroll 1
    for (int done = 0; done < count; done += kSteps) {
      if (segment || done) find_inputs<kRows>(l, segment, done, steps, held);
      multiply_held<kRows, kColumns>(held, count - done, {layer, segment, steps, done}, rows, sum);
    }
    if (segment == 0 && l.steps[1]) load_steps<kRows>(held, layer, 1, l.steps[1]);
  }
};

}  // namespace dpa::kernels::unet1d
