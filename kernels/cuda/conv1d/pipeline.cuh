// What the convolution's kernels share: the circular buffer of pipeline stages between the producer warp and the
// consumer warpgroups, and the tile of sums that the blocks of a cluster add up.
//
// A block has two consumer warpgroups, each of which multiplies its own 64 rows of the tile, and one producer warp, of
// which one thread issues the loads.
#pragma once
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/pipeline.cuh"
#include "kernels/cuda/common/ptx_cluster.cuh"
#include "kernels/cuda/common/ptx_copy.cuh"
#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/plans/conv1d/plan.h"

namespace dpa::kernels::conv1d {

constexpr int kConsumerThreads = 256;  // threads that multiply
constexpr int kThreads = kConsumerThreads + 32;
constexpr int kAlignment = 1024;  // of a swizzled stage

template <int kStages>
struct Pipeline {
  alignas(8) uint64_t full[kStages], empty[kStages];

  // One thread; a block barrier must follow.
  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      cuda::ptx::mbarrier_init(&full[i], 1);
      cuda::ptx::mbarrier_init(&empty[i], kConsumerThreads / 32);
    }
    cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
  }
};

template <int kStages>
__device__ __forceinline__ uint32_t full_barrier(Pipeline<kStages>& pipeline, const PipelineState& at) {
  return ptx::shared_address(&pipeline.full[at.stage]);
}

// The producer waits on the empty barrier of a stage, and announces its bytes at the full one.
template <int kStages>
__device__ __forceinline__ uint32_t acquire(Pipeline<kStages>& pipeline, const PipelineState& at, uint32_t bytes) {
  ptx::barrier_wait(ptx::shared_address(&pipeline.empty[at.stage]), at.phase ^ 1);
  const uint32_t full = full_barrier(pipeline, at);
  ptx::barrier_expect(full, bytes);
  return full;
}

// A consumer warpgroup releases a stage.
template <int kStages>
__device__ __forceinline__ void release(Pipeline<kStages>& pipeline, int stage) {
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::shared_address(&pipeline.empty[stage]));
}

// The consumers' mainloop: `multiply(stage, first)` issues the MMAs of one stage. A stage is released once the MMAs of
// the next one are in flight, so that the tensor cores never idle.
template <int kStages, class Multiply>
__device__ __forceinline__ void consume(Pipeline<kStages>& pipeline, int steps, Multiply&& multiply) {
  PipelineState at, before;
  for (int step = 0; step < steps; ++step) {
    ptx::barrier_wait(ptx::shared_address(&pipeline.full[at.stage]), at.phase);
    wgmma::fence();
    multiply(at.stage, step == 0);
    wgmma::commit();
    if (step > 0) {
      wgmma::wait<1>();
      release(pipeline, before.stage);
    }
    before = at;
    at.advance(kStages);
  }
  wgmma::wait<0>();
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

// The step range of block `rank` of `splits`: steps * rank / splits without more than 32 bits.
__device__ __forceinline__ int2 share(unsigned steps, unsigned rank, unsigned splits) {
  const unsigned each = steps / splits, left = steps % splits;
  return make_int2(each * rank + left * rank / splits, each * (rank + 1) + left * (rank + 1) / splits);
}

}  // namespace dpa::kernels::conv1d
