// A block of batch_norm_act: where its threads stand, and sums over those that share a column.
#pragma once
#include "kernels/cuda/batch_norm_act/batch_norm_act.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/vectors.cuh"

namespace dpa::kernels::batch_norm {

constexpr int kThreads = kBatchNormActThreads, kWarps = kThreads / kWarpSize;
constexpr int kMost = kBatchNormActWidest * 8;  // channels of a block

/// Where a thread stands.
template <class T>
struct Place {
  int lane, warp, column;   // column: of its vector among the block's
  int block, blocks, rank;  // among the blocks that share the column; of its cluster
  int row, step, rows;      // its first row, from one to the next, and the end
  int first, channel;       // the block's first channel, and the thread's
  int64_t stride, vector;   // vectors from a row to the next; its own one in row 0

  __device__ explicit Place(const BatchNormAct& args) {
    const BatchNormActPlan& plan = args.plan;
    lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    column = threadIdx.x & (plan.width - 1);
    blocks = plan.blocks();
    const int team = static_cast<int>(blockIdx.x / blocks), slots = kThreads / plan.width;
    block = static_cast<int>(blockIdx.x % blocks), rank = block & (plan.cluster - 1);
    row = block * slots + threadIdx.x / plan.width, step = blocks * slots, rows = static_cast<int>(args.shape.rows);
    stride = int64_t{plan.columns} * plan.width;
    vector = team * plan.width + column;
    first = team * plan.width * kVector<T>, channel = first + column * kVector<T>;
  }
  /// The first row of the block's cluster.
  __device__ __forceinline__ int first_row(const BatchNormActPlan& plan) const {
    return (block - rank) * (kThreads / plan.width);
  }
  /// How many rows the block has, or another of its cluster.
  __device__ __forceinline__ int rows_of_block() const { return rows_of_block(rank); }
  __device__ __forceinline__ int rows_of_block(int of_rank) const {
    const int slots = step / blocks, rest = rows % step - (block - rank + of_rank) * slots;
    return rows / step * slots + min(max(rest, 0), slots);
  }
  /// Calls `f(k, offset of the vector)` for its rows, `kAtOnce` at a time: `load` all, then `use` those that there are.
  /// `kBack`: from the last row to the first.
  template <int kAtOnce, bool kBack, class Load, class Use>
  __device__ __forceinline__ void each(Load&& load, Use&& use) const {
    const auto offset = [&](int at) { return vector + (kBack ? rows - 1 - at : at) * stride; };
    for (int base = row; base < rows; base += kAtOnce * step) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (base + k * step < rows) load(k, offset(base + k * step));
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (base + k * step < rows) use(k, offset(base + k * step));
    }
  }
  /// What all threads of the cluster wrote to shared memory is visible after.
  __device__ __forceinline__ void sync(const BatchNormActPlan& plan) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (plan.cluster > 1) return ptx::cluster_sync();
#endif
    __syncthreads();
  }
};

__device__ __forceinline__ uint4 vector_at(const void* data, int64_t at) { return static_cast<const uint4*>(data)[at]; }

/// Element `i` of a parameter of the type T or float32.
template <class T>
__device__ __forceinline__ float parameter(const BatchNormAct& args, const void* from, int i, float otherwise) {
  if (from == nullptr) return otherwise;
  if (args.parameter_dtype == DType::kFloat32) return static_cast<const float*>(from)[i];
  return widen(static_cast<const T*>(from)[i]);
}
template <class T>
__device__ __forceinline__ void store_parameter(const BatchNormAct& args, void* to, int i, float value) {
  if (to == nullptr) return;
  if (args.parameter_dtype == DType::kFloat32)
    static_cast<float*>(to)[i] = value;
  else
    static_cast<T*>(to)[i] = narrow<T>(value);
}

/// Sums over the threads of a block that share a column, of `kKinds` values for each channel.
template <int kKinds>
struct BlockSums {
  float warps[kWarps][kKinds][kMost], block[kKinds][kMost];

  /// Every thread must call. Afterwards `block` has the sums, for all threads; it may be used again behind a barrier.
  template <class T>
  __device__ __forceinline__ void add(const Place<T>& place, int width, float (&sums)[kKinds][kVector<T>]) {
    constexpr int kSize = kVector<T>;
    for (int offset = width; offset < kWarpSize; offset *= 2) {
#pragma unroll
      for (int kind = 0; kind < kKinds; ++kind)
#pragma unroll
        for (int i = 0; i < kSize; ++i) sums[kind][i] += __shfl_xor_sync(0xffffffffu, sums[kind][i], offset);
    }
    if (place.lane < width) {
#pragma unroll
      for (int kind = 0; kind < kKinds; ++kind)
#pragma unroll
        for (int i = 0; i < kSize; ++i) warps[place.warp][kind][place.column * kSize + i] = sums[kind][i];
    }
    __syncthreads();
    const int channel = threadIdx.x % kMost, kind = threadIdx.x / kMost;
    if (kind < kKinds && channel < width * kSize) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += warps[w][kind][channel];
      block[kind][channel] = sum;
    }
    __syncthreads();
  }
};

}  // namespace dpa::kernels::batch_norm
