// Sums over a warp and over a block.
#pragma once
#include <cuda_runtime.h>

namespace dpa::kernels {

constexpr int kWarpSize = 32;

/// Sums `x` over each aligned set of `width` lanes (a power of two up to 32). Every lane of the warp must call; every
/// lane of the set holds the sum.
template <class A>
__device__ __forceinline__ A warp_sum(A x, int width = kWarpSize) {
  for (int offset = width / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/// Sums `x` over the block, whose size is a multiple of 32. Every thread must call; every thread holds the sum.
/// `scratch` has one element a warp; it may be used again at once, for the call ends behind a barrier.
template <class A>
__device__ __forceinline__ A block_sum(A x, A* scratch) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  x = warp_sum(x);
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = warp_sum(lane < warps ? scratch[lane] : A(0));
  __syncthreads();
  return x;
}

}  // namespace dpa::kernels
