// What the convolution's kernels share: the ring of stages between the copying warp and the multiplying warpgroups, and
// the tile of sums that the blocks of a cluster add up.
//
// A block has two warpgroups that multiply, each its own 64 rows of the tile, and one warp of which a thread copies.
#pragma once
#include "kernels/cuda/conv1d/wgmma.cuh"
#include "kernels/plans/conv1d/plan.h"

namespace dpa::kernels::conv1d {

constexpr int kMultipliers = 256;  // threads that multiply
constexpr int kThreads = kMultipliers + 32;
constexpr int kAlignment = 1024;  // of a swizzled stage

template <int kStages>
struct Barriers {
  alignas(8) uint64_t full[kStages], empty[kStages];

  // One thread; a block barrier must follow.
  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(ptx::shared_address(&full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&empty[i]), kMultipliers / 32);
    }
    ptx::barrier_init_fence();
  }
};

// A walk around the ring: the stage, and the parity of its round. A ring may use fewer stages than it has barriers for.
template <int kStages>
struct Position {
  int stage = 0;
  uint32_t round = 0;
  __device__ __forceinline__ void advance(int stages = kStages) {
    if (++stage == stages) stage = 0, round ^= 1;
  }
};

template <int kStages>
__device__ __forceinline__ uint32_t full_barrier(Barriers<kStages>& barriers, const Position<kStages>& at) {
  return ptx::shared_address(&barriers.full[at.stage]);
}

// The copying thread waits until a stage may be written, and announces its bytes.
template <int kStages>
__device__ __forceinline__ uint32_t acquire(Barriers<kStages>& barriers, const Position<kStages>& at, uint32_t bytes) {
  ptx::barrier_wait(ptx::shared_address(&barriers.empty[at.stage]), at.round ^ 1);
  const uint32_t full = full_barrier(barriers, at);
  ptx::barrier_expect(full, bytes);
  return full;
}

// A warpgroup gives a stage back.
template <int kStages>
__device__ __forceinline__ void release(Barriers<kStages>& barriers, int stage) {
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::shared_address(&barriers.empty[stage]));
}

// The multiplying warpgroups' loop: `multiply(stage, first)` issues the products of one stage. A stage is given back
// once the products of the next one are under way, so that the tensor cores never run dry.
template <int kStages, class Multiply>
__device__ __forceinline__ void consume(Barriers<kStages>& barriers, int steps, Multiply&& multiply) {
  Position<kStages> at, before;
  for (int step = 0; step < steps; ++step) {
    ptx::barrier_wait(ptx::shared_address(&barriers.full[at.stage]), at.round);
    products_fence();
    multiply(at.stage, step == 0);
    products_commit();
    if (step > 0) {
      products_wait<1>();
      release(barriers, before.stage);
    }
    before = at;
    at.advance();
  }
  products_wait<0>();
}

// The sums of a block's tile in shared memory, float32 rows of kStride words: a stride of 8 modulo 32 keeps the writes
// of a warp's fragments free of bank conflicts. `column(j)` is where the j-th eight columns start.
template <int kColumns, int kStride, class Column>
__device__ __forceinline__ void store_sums(float* tile, const float (&sums)[kColumns / 2], Column&& column) {
  static_assert(kStride % 32 == 8, "rows must shift by 8 banks");
  const int thread = threadIdx.x, lane = thread % 32;
  float* row = tile + (thread / 32 * 16 + lane / 4) * kStride + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    *reinterpret_cast<float2*>(row + column(j)) = make_float2(sums[4 * j], sums[4 * j + 1]);
    *reinterpret_cast<float2*>(row + column(j) + 8 * kStride) = make_float2(sums[4 * j + 2], sums[4 * j + 3]);
  }
}

// The step range of block `rank` of `splits`, a power of two.
__device__ __forceinline__ int2 share(int steps, int rank, int splits) {
  const int shift = __ffs(splits) - 1;
  return make_int2(static_cast<int>(static_cast<int64_t>(steps) * rank >> shift),
                   static_cast<int>(static_cast<int64_t>(steps) * (rank + 1) >> shift));
}

}  // namespace dpa::kernels::conv1d
