// A 16 x 16 tile of weights (output channels x input channels) times 16 x 8 activations (input channels x columns), by
// one warp. 16-bit weights: one MMA with 16-bit activations. e4m3 weights: widened to float16. float32 weights:
// each factor is two float16 numbers, three MMAs, so that what is lost is of the order of 2^-22. Lane l holds of a
// column tile: column l / 4; of the sums: rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
#pragma once
#include <cuda_fp8.h>

#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/two_halves.cuh"

namespace dpa::kernels::unet1d {

/// Calls `f(TypeTag<Weight>{})` with the type of packed weights.
template <class F>
cudaError_t dispatch_weights(DType dtype, F&& f) {
  return dispatch_among<float, __half, __nv_bfloat16, __nv_fp8_e4m3>(dtype, f);
}

template <int n>
__device__ __forceinline__ float sum_of(const float (&v)[n]) {
  float sum[n / 2];
#pragma unroll
  for (int i = 0; i < n / 2; i++) sum[i] = v[2 * i] + v[2 * i + 1];
  if constexpr (n > 2)
    return sum_of(sum);
  else
    return sum[0];
}

template <class Weight>
struct Tile {
  static constexpr int kBytes = 512, kLaneBytes = 16;  // of a tile; from lane to lane
  using Activation = Weight;
  struct A {
    uint4 v;
  };
  struct B {
    uint32_t v[2];
  };
  struct Sum {
    float v[4] = {};
    __device__ __forceinline__ float operator[](int i) const { return v[i]; }
  };
  static __device__ __forceinline__ A load(const uint8_t* tile, int lane) {
    return {reinterpret_cast<const uint4*>(tile)[lane]};
  }
  // The same in two parts: what is loaded (zeros where not `valid`), and what is made of it.
  using Raw = A;
  static __device__ __forceinline__ Raw load_raw(const uint8_t* tile, int lane, bool valid) {
    return valid ? load(tile, lane) : Raw{};
  }
  static __device__ __forceinline__ A widen_raw(const Raw& raw) { return raw; }
  // Of what each load brought a word, or several combined: there when all are.
  static __device__ __forceinline__ uint32_t word_of_each_load(const Raw& raw) { return raw.v.x; }
  // The column's 16 channels: this lane needs channels 2 q, 2 q + 1, 2 q + 8, 2 q + 9 with q = lane % 4.
  template <class Get>
  static __device__ __forceinline__ B load_b(Get get, int lane) {
    const int q = lane % 4 * 2;
    return {{pack_pair<Weight>(get(q), get(q + 1)), pack_pair<Weight>(get(q + 8), get(q + 9))}};
  }
  static __device__ __forceinline__ void multiply(Sum& sum, const A& a, const B& b) {
    ptx::mma<Weight>(sum.v, a.v, b.v[0], b.v[1]);
  }
  // A lane's part of a tile, by its address in shared memory; or in global memory, of what the kernel does not write.
  static __device__ __forceinline__ Raw load_at(uint32_t address) { return {ptx::load_shared_16(address)}; }
  static __device__ __forceinline__ Raw load_at(const uint8_t* address, uint64_t policy) {
    return {ptx::load_stream_16(address, policy)};
  }
};

// Their scales are applied to the sums.
template <>
struct Tile<__nv_fp8_e4m3> : Tile<__half> {
  static constexpr int kBytes = 256, kLaneBytes = 8;
  using Raw = uint2;
  static __device__ __forceinline__ Raw load_raw(const uint8_t* tile, int lane, bool valid) {
    return valid ? reinterpret_cast<const uint2*>(tile)[lane] : Raw{};
  }
  static __device__ __forceinline__ A widen_raw(const Raw& raw) {
    uint32_t first[2], second[2];
    ptx::widen_e4m3(first, raw.x);
    ptx::widen_e4m3(second, raw.y);
    return {{first[0], first[1], second[0], second[1]}};
  }
  static __device__ __forceinline__ uint32_t word_of_each_load(const Raw& raw) { return raw.x; }
  static __device__ __forceinline__ A load(const uint8_t* tile, int lane) {
    return widen_raw(load_raw(tile, lane, true));
  }
  static __device__ __forceinline__ Raw load_at(uint32_t address) { return ptx::load_shared_8(address); }
  static __device__ __forceinline__ Raw load_at(const uint8_t* address, uint64_t policy) {
    return ptx::load_stream_8(address, policy);
  }
};

// The tile's high halves, then its low ones; and so the activations.
template <>
struct Tile<float> {
  static constexpr int kBytes = 1024, kLaneBytes = 16;
  using Activation = float;
  struct A {
    uint4 high, low;
  };
  struct B {
    uint32_t v[4];
  };
  struct Sum {
    float high[4] = {}, low[4] = {};
    __device__ __forceinline__ float operator[](int i) const { return fmaf(low[i], 1.0f / math::kLowScale, high[i]); }
  };
  using Raw = A;
  static __device__ __forceinline__ Raw load_raw(const uint8_t* tile, int lane, bool valid) {
    const uint4* at = reinterpret_cast<const uint4*>(tile) + lane;
    return valid ? Raw{at[0], at[32]} : Raw{};
  }
  static __device__ __forceinline__ A widen_raw(const Raw& raw) { return raw; }
  static __device__ __forceinline__ uint32_t word_of_each_load(const Raw& raw) { return raw.high.x | raw.low.x; }
  static __device__ __forceinline__ A load(const uint8_t* tile, int lane) { return load_raw(tile, lane, true); }
  static __device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
    split_pair(x, y, math::kActivationScale, high, low);
  }
  template <class Get>
  static __device__ __forceinline__ B load_b(Get get, int lane) {
    const int q = lane % 4 * 2;
    B b;
    split(get(q), get(q + 1), b.v[0], b.v[2]);
    split(get(q + 8), get(q + 9), b.v[1], b.v[3]);
    return b;
  }
  static __device__ __forceinline__ void multiply(Sum& sum, const A& a, const B& b) {
    ptx::mma<__half>(sum.low, a.low, b.v[0], b.v[1]);
    ptx::mma<__half>(sum.high, a.high, b.v[0], b.v[1]);
    ptx::mma<__half>(sum.low, a.high, b.v[2], b.v[3]);
  }
  static __device__ __forceinline__ Raw load_at(uint32_t address) {
    return {ptx::load_shared_16(address), ptx::load_shared_16(address + 512)};
  }
  static __device__ __forceinline__ Raw load_at(const uint8_t* address, uint64_t policy) {
    return {ptx::load_stream_16(address, policy), ptx::load_stream_16(address + 512, policy)};
  }
};

}  // namespace dpa::kernels::unet1d
