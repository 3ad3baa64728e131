// Vectors of 16 bytes as floats, and moments of sets that are merged.
#pragma once
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/ptx_cluster.cuh"
#include "kernels/cuda/common/reduce.cuh"

namespace dpa::kernels {

/// Elements of a vector.
template <class T>
constexpr int kVector = 16 / sizeof(T);

template <class T>
__device__ __forceinline__ void unpack(uint4 vector, float (&to)[kVector<T>]) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      to[i] = __uint_as_float(words[i]);
    } else {
      const float2 pair = unpack_pair<T>(words[i]);
      to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
  }
}
template <class T>
__device__ __forceinline__ uint4 pack(const float (&from)[kVector<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(from[i]);
    } else {
      words[i] = pack_pair<T>(from[2 * i], from[2 * i + 1]);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

/// The float at `address` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ float load_of_peer(const float* address, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];"
               : "=f"(value)
               : "r"(ptx::cluster_address(ptx::shared_address(address), rank))
               : "memory");
  return value;
#else
  return *address;
#endif
}

/// How many values there are, their mean, and the sum of their squared distances from it.
struct Moments {
  float count = 0, mean = 0, squares = 0;

  __device__ __forceinline__ void merge(float count_, float mean_, float squares_) {
    const float all = count + count_;
    if (all == 0) return;
    const float share = count_ / all, distance = mean_ - mean;
    squares += squares_ + distance * distance * count * share;
    mean = fmaf(distance, share, mean);
    count = all;
  }
  __device__ __forceinline__ void merge_lane(int offset) {
    merge(__shfl_xor_sync(0xffffffffu, count, offset), __shfl_xor_sync(0xffffffffu, mean, offset),
          __shfl_xor_sync(0xffffffffu, squares, offset));
  }
};

}  // namespace dpa::kernels
