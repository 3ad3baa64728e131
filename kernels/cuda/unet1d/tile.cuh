// A 16 x 16 tile of weights (output channels x input channels) times 16 x 8 activations (input channels x columns), by
// one warp. 16-bit weights: one MMA with 16-bit activations. e4m3 weights: widened to float16. float32 weights:
// each factor split into two tf32 parts, three MMAs, so that what is lost is of the order of 2^-22. Lane l holds of
// a column tile: column l / 4; of the accumulators c: rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
#pragma once
#include <cuda_fp8.h>

#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/ptx.cuh"

namespace dpa::kernels::unet1d {

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
  static __device__ __forceinline__ A load(const uint8_t* tile, int lane) {
    return {reinterpret_cast<const uint4*>(tile)[lane]};
  }
  // The same in two parts: what is loaded (zeros where not `valid`), and what is made of it.
  using Raw = A;
  static __device__ __forceinline__ Raw load_raw(const uint8_t* tile, int lane, bool valid) {
    return valid ? load(tile, lane) : Raw{};
  }
  static __device__ __forceinline__ A widen_raw(const Raw& raw) { return raw; }
  // The column's 16 channels: this lane needs channels 2 q, 2 q + 1, 2 q + 8, 2 q + 9 with q = lane % 4.
  template <class Get>
  static __device__ __forceinline__ B load_b(Get get, int lane) {
    const int q = lane % 4 * 2;
    return {{pack_pair<Weight>(get(q), get(q + 1)), pack_pair<Weight>(get(q + 8), get(q + 9))}};
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const A& a, const B& b) {
    ptx::mma<Weight>(c, a.v, b.v[0], b.v[1]);
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
  static __device__ __forceinline__ A load(const uint8_t* tile, int lane) {
    return widen_raw(load_raw(tile, lane, true));
  }
};

template <>
struct Tile<float> {
  static constexpr int kBytes = 1024, kLaneBytes = 16;
  using Activation = float;
  struct A {
    uint4 high[2], low[2];
  };
  struct B {
    uint32_t high[4], low[4];
  };
  static __device__ __forceinline__ void split(float x, uint32_t& high, uint32_t& low) {
    ptx::split_tf32(x, high, low);
  }
  struct Raw {
    float4 w[2];
  };
  static __device__ __forceinline__ Raw load_raw(const uint8_t* tile, int lane, bool valid) {
    const float4* at = reinterpret_cast<const float4*>(tile) + lane;
    return valid ? Raw{{at[0], at[32]}} : Raw{};
  }
  static __device__ __forceinline__ A widen_raw(const Raw& raw) {
    A a;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      split(raw.w[h].x, a.high[h].x, a.low[h].x);
      split(raw.w[h].y, a.high[h].y, a.low[h].y);
      split(raw.w[h].z, a.high[h].z, a.low[h].z);
      split(raw.w[h].w, a.high[h].w, a.low[h].w);
    }
    return a;
  }
  static __device__ __forceinline__ A load(const uint8_t* tile, int lane) {
    return widen_raw(load_raw(tile, lane, true));
  }
  template <class Get>
  static __device__ __forceinline__ B load_b(Get get, int lane) {
    B b;
#pragma unroll
    for (int i = 0; i < 4; i++) split(get(lane % 4 + i * 4), b.high[i], b.low[i]);
    return b;
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const A& a, const B& b) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      ptx::mma<float>(c, a.low[h], b.high[2 * h], b.high[2 * h + 1]);
      ptx::mma<float>(c, a.high[h], b.low[2 * h], b.low[2 * h + 1]);
      ptx::mma<float>(c, a.high[h], b.high[2 * h], b.high[2 * h + 1]);
    }
  }
};

}  // namespace dpa::kernels::unet1d
