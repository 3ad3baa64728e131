// What a product's kernel and its ends (finish.cuh, normalise.cuh) share.
#pragma once
#include "kernels/conv1d/conv1d.h"
#include "kernels/conv1d/launch.cuh"
#include "kernels/conv1d/ring.cuh"

namespace dpa::kernels::conv1d {

struct ProductArgs {
  ProductPlan plan;
  int64_t batch, out_length, outputs;
  Addends addends;
  bool float_bias;
  void* out;  // with a normalisation it may be null
  Normalisation normalisation;
  bool settled;                   // the weights: see `Weights`
  bool release;                   // let the next kernel's blocks take their places once the products are done
  unsigned blocks;                // of the product; those behind are the side's
  int boxes;                      // in the ring of them
  uint32_t box_bytes, box_stage;  // what the copy engine brings, and the distance in the ring
  Side side;
};

constexpr int kMaxBoxes = 4;

// The barriers of the two rings between the copying thread and the multiplying warpgroups.
template <int kWeights>
struct Rings {
  Barriers<kMaxBoxes> boxes;
  Barriers<kWeights> weights;
};

template <int kColumns>
struct ProductShape {
  // Two blocks of the narrow tile share a multiprocessor: one multiplies while the other fills its ring or finishes.
  static constexpr int kBlocks = kColumns == 128 ? 2 : 1;
  // Boxes of x, of a size that the plan gives, then weights, then the barriers of both rings.
  static constexpr uint32_t kBoxesBytes = 64 * 1024, kWeightBytes = kColumns * kChunk * 2;
  static constexpr int kWeights = kColumns == 128 ? 3 : 4;
  static constexpr uint32_t kBarriersAt = kBoxesBytes + kWeights * kWeightBytes;
  static constexpr int kBytes = kBarriersAt + sizeof(Rings<kWeights>);
  static constexpr int kStride = kColumns + 8;
  static_assert(kTileRows * kStride * 4 <= kBarriersAt, "the tile of sums takes the rings' place");
  static_assert(kBlocks * (kBytes + 1024) <= 228 * 1024, "that many blocks find their place");
};

// Which tile a block works on. 32-bit arithmetic: `serves` keeps the counts small, and a division is short.
struct Place {
  int rank, phase, first_sample, first_time, first_column;
  __device__ Place(const ProductPlan& plan, int columns, unsigned index) {
    const unsigned splits = plan.splits, column_tiles = static_cast<unsigned>(plan.column_tiles);
    const unsigned per_sample = plan.rows.per_sample;
    rank = index % splits, index /= splits;
    first_column = index % column_tiles * columns, index /= column_tiles;
    phase = plan.phases == 1 ? 0 : index & 1, index = plan.phases == 1 ? index : index >> 1;
    first_sample = index / per_sample * plan.rows.samples;
    first_time = index % per_sample * plan.rows.time;
  }
};

// Four neighbouring elements of 16 bits.
template <class T>
struct alignas(8) Four {
  T element[4];
};

// Four neighbouring values at `n`, float32 or T; `otherwise` without any.
template <class T>
__device__ __forceinline__ float4 load_four(const void* values, bool wide, int64_t n, float otherwise) {
  if (!values) return make_float4(otherwise, otherwise, otherwise, otherwise);
  if (wide) return *reinterpret_cast<const float4*>(static_cast<const float*>(values) + n);
  const auto four = *reinterpret_cast<const Four<T>*>(static_cast<const T*>(values) + n);
  return make_float4(widen(four.element[0]), widen(four.element[1]), widen(four.element[2]), widen(four.element[3]));
}

template <class T>
__device__ __forceinline__ void store_four(void* values, int64_t n, const float (&x)[4]) {
  Four<T> four;
#pragma unroll
  for (int e = 0; e < 4; ++e) four.element[e] = narrow<T>(x[e]);
  *reinterpret_cast<Four<T>*>(static_cast<T*>(values) + n) = four;
}

// Adds up the cluster's sums of four columns of `kRows` rows, the first at `from`, `distance` bytes apart. Loads from
// two peers are under way at a time, where the registers allow it.
template <int kRows>
__device__ __forceinline__ void add_peers(float4 (&sums)[kRows], uint32_t from, uint32_t distance, int splits) {
  constexpr int kAtOnce = kRows <= 4 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < kRows; ++i) sums[i] = splits == 1 ? load_shared(from + i * distance) : float4{};
  if (splits == 1) return;
#pragma unroll 1
  for (int peer = 0; peer < splits; peer += kAtOnce) {
    float4 v[kAtOnce][kRows];
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p)
#pragma unroll
      for (int i = 0; i < kRows; ++i) v[p][i] = load_shared_of(peer_address(from + i * distance, peer + p));
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p)
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        sums[i].x += v[p][i].x, sums[i].y += v[p][i].y, sums[i].z += v[p][i].z, sums[i].w += v[p][i].w;
  }
}

}  // namespace dpa::kernels::conv1d
