// fprop and dgrad of float32 by weights as they lie in the parameter, (d0, d1, taps), multiplied in tf32: nothing packs
// them, so they are read from memory once.
//
// wgmma takes 32-bit operands from shared memory with rows along K alone, and here taps lie between neighbours along K
// (fprop) or rows run along N (dgrad). From registers it takes a left operand in any order: so the GEMM is transposed,
//   out[n, (sample, time)] = sum over taps and channels c of weight[n, c, tap] x[c, (sample, time)]
// with weights on the left, from shared memory to registers a word at a time, and the rows of a box of x on the right.
//
// stage      kInPlaceChannels contracted channels c, all taps, of the tile's outputs n; two of them a box of x. fprop: a row
//            an output, its channels and taps side by side. dgrad: boxes of 32 outputs, a row of them a contracted
//            channel. A row is 4 or 8 words longer than what is read of it: a warp's 8 outputs by 4 channels then meet
//            every bank once, since the number of taps is odd
// warpgroup  64 outputs by all 128 rows of the tile; of 64 columns: all outputs by 64 rows
#pragma once
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/conv1d/epilogue_norm.cuh"

namespace dpa::kernels::conv1d {

constexpr int kBoxStages = kStepChannels<float> / kInPlaceChannels;  // of weights, for a box of x

// One thread: the weights of a stage whose first contracted channel is `channel`.
__device__ __forceinline__ void load_in_place(const CUtensorMap* map, const InPlaceStage& stage, int first_column,
                                              int channel, uint32_t to, uint32_t full) {
  if (!stage.transposed) return ptx::tma_load(to, map, channel * stage.taps, first_column, 0, full);
#pragma unroll 1
  for (int box = 0; box < stage.boxes; ++box)
    ptx::tma_load(to + box * stage.box_bytes, map, (first_column + box * kInPlaceOutputs) * stage.taps, channel, 0,
                  full);
}

// A thread's words of a stage: outputs lane / 4 and that + 8 of its warp's 16, channels lane % 4 and that + 4 of eight.
struct InPlaceWords {
  static constexpr int kMmas = kInPlaceChannels / 8;
  uint32_t at[kMmas][4];

  __device__ __forceinline__ InPlaceWords(const InPlaceStage& stage, uint32_t weights, int output) {
    const uint32_t first = weights + output / kInPlaceOutputs * stage.of_outputs +
                           output % kInPlaceOutputs * stage.of_output + threadIdx.x % 4 * stage.of_channel;
#pragma unroll
    for (int k = 0; k < kMmas; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        at[k][i] = first + i % 2 * 8 * stage.of_output + (i / 2 * 4 + k * 8) * stage.of_channel;
        asm volatile("" : "+r"(at[k][i]));  // kept, where the compiler would find it again for every MMA
      }
  }
  __device__ __forceinline__ uint4 load(uint32_t from, int k) const {
    return make_uint4(ptx::load_shared_word(at[k][0] + from), ptx::load_shared_word(at[k][1] + from),
                      ptx::load_shared_word(at[k][2] + from), ptx::load_shared_word(at[k][3] + from));
  }
};

// Accumulators of a warpgroup to the tile. Of four lanes two store an odd row first, so that all meet other banks.
template <int kColumns, bool kBySample>
__device__ __forceinline__ void store_transposed(const ConvArgs& args, float* tile, const float (&sums)[kColumns / 2]) {
  constexpr int kStride = ConvShape<kColumns>::kStride;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, odd = lane % 4 / 2;
  const int column = (kColumns == 128 ? warp : warp % 4) * 16 + lane / 4;
  const int first_row = (kColumns == 128 ? 0 : warp / 4 * 64) + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = first_row + 8 * i + (e ^ odd);
      const float* const both = sums + 4 * i;
      int place = row, turned = 0;
      if constexpr (kBySample) {
        const int time = args.shares.by_samples(row), sample = row - time * args.plan.rows.samples;
        if (row >= args.plan.tile_rows) continue;
        place = sample * args.plan.rows.time + time, turned = swizzle(sample);
      }
      tile[place * kStride + (column ^ turned)] = odd ? both[1 - e] : both[e];
      tile[place * kStride + (column + 8 ^ turned)] = odd ? both[3 - e] : both[2 + e];
    }
  }
}

// The consumer warpgroups' main loop. A stage's MMAs of a term are in flight while the next ones' weights are loaded.
template <int kColumns, bool kBySample>
__device__ __forceinline__ void consume_in_place(uint32_t memory, Pipelines& pipelines, const ConvArgs& args,
                                                 const Work& work, float* tile) {
  static_assert(kColumns == 64 || kColumns == 128, "a warpgroup has 64 or 128 rows of the tile");
  static_assert(kBoxStages == 2, "a box has an even number of terms and stages");
  constexpr int kMmas = InPlaceWords::kMmas;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int output = (kColumns == 128 ? threadIdx.x / 32 : threadIdx.x / 32 % 4) * 16 + threadIdx.x % 32 / 4;
  const uint32_t rows = memory + work.start + (kColumns == 128 ? 0 : warpgroup * 64 * kRowBytes);
  const InPlaceWords words(args.in_place, memory + ConvShape<kColumns>::kBoxesBytes, output);
  // Terms that meet more than padding in this warpgroup's rows.
  const auto of_rows = [&](const int(&terms)[2], bool least) {
    return kColumns == 64 ? terms[warpgroup] : least ? min(terms[0], terms[1]) : max(terms[0], terms[1]);
  };
  const int first_term = of_rows(args.plan.first_term, true), end_term = of_rows(args.plan.end_term, false);
  float sums[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sums[i] = 0;
  PipelineState weight_at, box_at;
  int weight_previous = -1, box_previous = -1;
  const auto release_previous = [&] {
    if (weight_previous >= 0) release(pipelines.weights, weight_previous);
    if (box_previous >= 0) release(pipelines.boxes, box_previous);
    weight_previous = box_previous = -1;
  };
  int term = first_term, half = 0;
  const auto wait_for_weights = [&] { ptx::barrier_wait(full_barrier(pipelines.weights, weight_at), weight_at.phase); };
  const auto leave_weights = [&] { weight_previous = weight_at.stage, weight_at.advance(args.weights); };
  // The MMAs of a term and of half of a box. Behind it only they are in flight: what earlier ones have read is free.
  const auto step = [&](uint4(&a)[kMmas]) {
    if (term == first_term) wait_for_weights();
    const uint32_t from = weight_at.stage * args.in_place.bytes + term * 4;
    const uint64_t b =
        wgmma::swizzled(rows + box_at.stage * args.box_stage + term * work.delta, 16, 1024, wgmma::Swizzle::k128) +
        half * kMmas * 2;
#pragma unroll
    for (int k = 0; k < kMmas; ++k) a[k] = words.load(from, k);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < kMmas; ++k) wgmma::mma_rs<float, kColumns>(sums, a[k], b + k * 2);
    wgmma::commit();
    wgmma::wait<1>();
    release_previous();
    if (++term == end_term) term = first_term, ++half, leave_weights();
  };
  uint4 a[2][kMmas];  // of the MMAs in flight, and of the next
#pragma unroll 1
  for (int box = 0; box < work.count; ++box) {
    ptx::barrier_wait(full_barrier(pipelines.boxes, box_at), box_at.phase);
    half = 0;
    if (first_term < end_term) {
#pragma unroll 1
      for (int steps = end_term - first_term; steps > 0; --steps) step(a[0]), step(a[1]);
    } else {  // none of this warpgroup's rows is used
#pragma unroll 1
      for (int i = 0; i < kBoxStages; ++i) wait_for_weights(), leave_weights(), release_previous();
    }
    box_previous = box_at.stage;
    box_at.advance(args.boxes);
    if (first_term >= end_term) release_previous();
  }
  wgmma::wait<0>();
  leave_stages</*kSplit=*/true>(args);
  store_transposed<kColumns, kBySample>(args, tile, sums);
}

}  // namespace dpa::kernels::conv1d
