// wgrad of float32, multiplied in tf32: gradient[i, j, k] = sum over b, t of y[b, t, i] x[b, stride t + k - padding, j]
//
// wgmma reads 32-bit operands along K alone, which here is (b, t), and in memory channels run fastest. So y, the left
// operand, goes from shared memory to registers, and x is transposed within shared memory: a step has kSamples samples
// of kTimes times; one MMA contracts the samples of one time.
//
// A tile is as in wgrad.cu: kHeight * 128 channels i by kXChannels channels j by all taps k. The transposed x is rows
// (time, j) of the samples, eight rows a core matrix, without swizzle. The columns (k, j) that time t of y meets are
// the rows from time stride t - padding on: one operand, whose beginning moves from t to t.
//
// The samples' order within an MMA is even ones, then odd ones, so that the registers' loads from rows swizzled by
// eight meet every bank once.
//
// cluster   one tile; split-K, as in wgrad.cu
// block     a producer warp issues loads, three warps transpose x, two consumer warpgroups multiply kHeight times 64
//           channels i x all columns each
// epilogue  wgrad.cuh
#pragma once
#include "kernels/cuda/conv1d/tensor_map.h"
#include "kernels/cuda/conv1d/wgrad.cuh"

namespace dpa::kernels::conv1d {

constexpr int kSamples = kTf32Samples, kTimes = kTf32Times;
static_assert(kSamples == 8, "an MMA contracts eight samples, and a swizzle is over eight rows");

constexpr int kTf32Transposers = 3;  // warps

template <int kTaps_, int kAtoms_, int kHeight_>
struct Tf32Shape {
  static constexpr int kTaps = kTaps_, kAtoms = kAtoms_, kHeight = kHeight_;
  static constexpr int kXChannels = kAtoms * 32;
  static constexpr int kColumns = kTaps * kXChannels;
  static constexpr int kYChannels = kHeight * kTileRows;
  static constexpr int kXTimes = (kTaps == 1 ? 1 : 2) * (kTimes - 1) + kTaps;  // that a step reads, at a stride of two
  static constexpr uint32_t kTimeBytes = kSamples * 128;                       // of one time in a box of 32 channels
  static constexpr uint32_t kYBox = kTimes * kTimeBytes, kXBox = kXTimes * kTimeBytes;
  static constexpr uint32_t kXAt = kYChannels / 32 * kYBox, kTransposedAt = kXAt + kAtoms * kXBox;
  static constexpr uint32_t kStageBytes = kTransposedAt + kAtoms * kXBox;
  static constexpr int kStages = 220 * 1024 / kStageBytes;
  static constexpr int kBytes = kStages * kStageBytes + kAlignment;
  static constexpr int kSums = kColumns / 2;    // of a thread in 64 channels i
  static constexpr int kRow = kColumns + 8;     // of the tile, in words: a warp's rows start at different banks
  static constexpr int kProducerThreads = 128;  // a whole warpgroup can give registers away
  static_assert(kYChannels * kRow * 4 <= kStages * kStageBytes, "the tile of sums replaces the stages");
};

// full: y and x have arrived. transposed: and x is transposed. empty: the consumers have read both.
template <int kStages>
struct Tf32Pipeline {
  Pipeline<kStages> loads;
  alignas(8) uint64_t transposed[kStages];

  __device__ void init() {  // by one thread
    for (auto& barrier : transposed) cuda::ptx::mbarrier_init(&barrier, kTf32Transposers);
    loads.init();
  }
};

// A warp transposes four samples of one time of 32 channels at a time, a lane one channel of them.
template <class Shape>
__device__ __forceinline__ void transpose_rows(const WgradArgs& args, uint32_t buffer,
                                               Tf32Pipeline<Shape::kStages>& pipeline, int steps) {
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - kConsumerThreads) / 32 - 1;
  const int units = (args.stride * (kTimes - 1) + Shape::kTaps) * Shape::kAtoms * 2;
  PipelineState at;
  for (int step = 0; step < steps; ++step, at.advance(Shape::kStages)) {
    ptx::barrier_wait(full_barrier(pipeline.loads, at), at.phase);
    const uint32_t stage = buffer + at.stage * Shape::kStageBytes;
#pragma unroll 2
    for (int unit = warp; unit < units; unit += kTf32Transposers) {
      const int odd = unit % 2, atom = unit / 2 % Shape::kAtoms, time = unit / 2 / Shape::kAtoms;
      const uint32_t from = stage + Shape::kXAt + atom * Shape::kXBox + time * Shape::kTimeBytes + lane % 4 * 4;
      uint32_t words[4];
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const int sample = 2 * s + odd;
        words[s] = ptx::load_shared_word(from + sample * 128 + ((lane / 4 ^ sample) << 4));
      }
      ptx::store_shared_16(stage + Shape::kTransposedAt + (time * Shape::kAtoms * 4 + atom * 4 + lane / 8) * 256 +
                               odd * 128 + lane % 8 * 16,
                           make_uint4(words[0], words[1], words[2], words[3]));
    }
    cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&pipeline.transposed[at.stage]));
  }
}

template <class Shape>
__device__ __forceinline__ void consume_rows(const WgradArgs& args, uint32_t buffer,
                                             Tf32Pipeline<Shape::kStages>& pipeline, int steps, float* tile) {
  constexpr int kHeight = Shape::kHeight;
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  // Of rows lane / 4 and that + 8 of an MMA's left operand, in samples 2 (lane % 4) and the next one.
  uint32_t at_sample[2];
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const int sample = lane % 4 * 2 + odd, sixteen = warp % 2 * 4 + lane / 16;
    at_sample[odd] =
        (group * kHeight * 2 + warp / 2) * Shape::kYBox + sample * 128 + ((sixteen ^ sample) << 4) + lane / 4 % 4 * 4;
  }
  const int slide = args.stride * Shape::kAtoms * 4 * 16;  // of the right operand from time to time, in units
  float sums[kHeight][Shape::kSums];
#pragma unroll
  for (int m = 0; m < kHeight; ++m)
#pragma unroll
    for (int i = 0; i < Shape::kSums; ++i) sums[m][i] = 0;
  static_assert(kTimes % 2 == 0, "a time has the same registers in every step");
  uint4 a[2][kHeight];  // of the MMAs in flight, and of the next
  PipelineState at;
  int previous = -1;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, at.advance(Shape::kStages)) {
    const uint32_t y = buffer + at.stage * Shape::kStageBytes;
    uint64_t b =
        static_cast<uint64_t>(16) << 32 | static_cast<uint64_t>(8) << 16 | wgmma::units(y + Shape::kTransposedAt);
    ptx::barrier_wait(full_barrier(pipeline.loads, at), at.phase);
#pragma unroll
    for (int t = 0; t < kTimes; ++t, b += slide) {
#pragma unroll
      for (int m = 0; m < kHeight; ++m) {
        const uint32_t even = y + at_sample[0] + t * Shape::kTimeBytes + m * 2 * Shape::kYBox;
        const uint32_t odd = y + at_sample[1] + t * Shape::kTimeBytes + m * 2 * Shape::kYBox;
        a[t % 2][m] = make_uint4(ptx::load_shared_word(even), ptx::load_shared_word(even ^ 32),
                                 ptx::load_shared_word(odd), ptx::load_shared_word(odd ^ 32));
      }
      if (t == 0) ptx::barrier_wait(ptx::shared_address(&pipeline.transposed[at.stage]), at.phase);
      wgmma::fence();
#pragma unroll
      for (int m = 0; m < kHeight; ++m) wgmma::mma_rs<float, Shape::kColumns>(sums[m], a[t % 2][m], b);
      wgmma::commit();
      wgmma::wait<1>();
      if (t == 0 && previous >= 0) release(pipeline.loads, previous);
    }
    previous = at.stage;
  }
  wgmma::wait<0>();
  ptx::sync_threads(1, kConsumerThreads);  // the tile takes the place of what the other warpgroup still read
  store_tile<Shape>(tile, sums);
}

// A block's work on its tile, behind `begin_block`. `produce`, by one thread, loads the stages of the block's steps.
template <class Shape, class Produce>
__device__ __forceinline__ void wgrad_tile(const WgradArgs& args, const WgradBlock& block,
                                           Tf32Pipeline<Shape::kStages>& pipeline, Produce&& produce) {
  __syncthreads();
  grid_dependency_sync();
  const uint32_t buffer = ptx::shared_address(block.memory);
  const int steps = block.steps.y - block.steps.x;
  if (threadIdx.x >= kConsumerThreads) {
    ptx::registers_decrease<40>();
    if (threadIdx.x >= kConsumerThreads + 32)
      transpose_rows<Shape>(args, buffer, pipeline, steps);
    else if (threadIdx.x == kConsumerThreads)
      produce(buffer);
    follow_epilogue(args.plan);
  } else {
    ptx::registers_increase<232>();
    float* const tile = reinterpret_cast<float*>(block.memory);
    consume_rows<Shape>(args, buffer, pipeline, steps, tile);
    store_gradient<float, Shape>(args, block.first_y, block.first_x, block.rank, tile);
  }
}

}  // namespace dpa::kernels::conv1d
