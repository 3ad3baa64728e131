// What the matrix instructions of a tile are given and give: weights, activations, sums.
#pragma once
#include "kernels/cuda/unet1d/phases_weights.cuh"
#include "kernels/math/two_halves.h"

namespace dpa::kernels::unet1d::device {

// A tile's fragments, ready for the matrix instructions.
template <class Tile>
struct Fragments {
  uint4 a;
  DPA_DEVICE void load(uint32_t at) { a = load_shared_16(at); }
};
// e4m3: the sums lack a factor of kWidenedE4m3.
template <>
struct Fragments<TileE4m3> {
  uint4 a;
  DPA_DEVICE void widen(const uint2& v) {
    a.x = widen_e4m3<0x1404>(v.x), a.y = widen_e4m3<0x3424>(v.x);
    a.z = widen_e4m3<0x1404>(v.y), a.w = widen_e4m3<0x3424>(v.y);
  }
  DPA_DEVICE void load(uint32_t at) { widen(load_shared_8(at)); }
};
template <>
struct Fragments<TileFp32> {
  uint4 high, low;
  DPA_DEVICE void load(uint32_t at) { high = load_shared_16(at), low = load_shared_16(at + 512); }
};

// The activations of a GEMM: a row of channels, 16 bytes behind it; of float32 the high halves, then the low ones.
template <class Tile>
constexpr int kActivationBytes = Tile::kWide ? 4 : 2;
DPA_DEVICE int low_halves(int pitch) { return (pitch - 16) / 2; }
// Four channels of a row: of float32 the high halves and the low ones.
template <class Tile>
struct FourActivations {
  static constexpr int kParts = Tile::kWide ? 2 : 1;
  uint2 part[kParts];
  explicit DPA_DEVICE FourActivations(const float (&v)[4]) {
    using Math = typename Tile::Math;
    if constexpr (Tile::kWide) {
      split_pair(v[0], v[1], math::kActivationScale, part[0].x, part[1].x);
      split_pair(v[2], v[3], math::kActivationScale, part[0].y, part[1].y);
    } else {
      part[0] = make_uint2(pack(Math{}, v[0], v[1]), pack(Math{}, v[2], v[3]));
    }
  }
  DPA_DEVICE void store(uint8_t* to, int pitch) const {
#pragma unroll
    for (int i = 0; i < kParts; i++) *reinterpret_cast<uint2*>(to + i * low_halves(pitch)) = part[i];
  }
};

// A lane's part of a load of four matrices along K: of float32 a step's high and low halves.
template <class Tile>
DPA_DEVICE int lane_part(int pitch) {
  const int lane = thread() & 31;
  return (lane >> 3 & 1) * 16 + (Tile::kWide && lane & 16 ? low_halves(pitch) : 0);
}

// The sums of a row tile, by column tiles. float32 has its small terms apart; and so has a single column tile
// every second step, for a chain of MMAs on one accumulator would take most of the time.
template <class Tile, int kColumnTiles>
struct RunSums {
  static constexpr bool kWide = Tile::kWide, kOne = !kWide && kColumnTiles == 1;
  float (&sum)[kColumnTiles][4];
  float other[kWide || kOne ? kColumnTiles : 1][4] = {};
  // A step of a single column tile.
  DPA_DEVICE void multiply_one(const Fragments<Tile>& a, bool second, uint32_t b0, uint32_t b1) {
    mma(typename Tile::Math{}, second ? other[0] : sum[0], a.a, b0, b1);
  }
  // Load i of a step.
  DPA_DEVICE void multiply(const Fragments<Tile>& a, int i, const uint32_t (&b)[4]) {
    if constexpr (kWide) {
      mma(Half{}, other[i], a.low, b[0], b[1]);
      mma(Half{}, sum[i], a.high, b[0], b[1]);
      mma(Half{}, other[i], a.high, b[2], b[3]);
    } else {
      mma(typename Tile::Math{}, sum[2 * i], a.a, b[0], b[1]);
      mma(typename Tile::Math{}, sum[2 * i + 1], a.a, b[2], b[3]);
    }
  }
  DPA_DEVICE void finish() {
    if constexpr (kWide || kOne) {
#pragma unroll
      for (int i = 0; i < kColumnTiles; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) sum[i][j] += other[i][j] * (kWide ? 1.0f / math::kLowScale : 1.0f);
      }
    }
  }
};

}  // namespace dpa::kernels::unet1d::device
