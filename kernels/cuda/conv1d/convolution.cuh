// What the convolution's kernel and its epilogues (epilogue.cuh, epilogue_norm.cuh) share.
#pragma once
#include "kernels/cuda/conv1d/conv1d.h"
#include "kernels/cuda/conv1d/launch.cuh"
#include "kernels/cuda/conv1d/pipeline.cuh"

namespace dpa::kernels::conv1d {

// n / divisor, exact where n times the divisor is below 2^16.
struct Divisor {
  uint32_t factor;
  __host__ __device__ explicit Divisor(int divisor = 1) : factor((65536 + divisor - 1) / divisor) {}
  __device__ __forceinline__ int operator()(int n) const { return static_cast<int>(n * factor >> 16); }
};

// What the blocks of a cluster finish of their tile, and what the epilogue with an exchange of moments needs to know
// (epilogue_exchange.cuh).
constexpr int kMostOwned = 32;  // rows of a block there
struct Shares {
  int rows, of_warp;         // of a block; of a warp
  int width, groups, lanes;  // of a group: columns in a tile; how many groups; lanes of one
  bool crosses;              // a sample or a group is not one block's alone
  int tiles, parts;          // that share a group; most blocks that share a sample's group
  float over;                // one by the values of a sample's group
  Divisor by_times, by_samples, by_lanes, by_groups, by_rows;

  Shares() = default;
  Shares(const ConvPlan& plan, int group)
      : rows((plan.tile_rows + plan.splits - 1) / plan.splits),
        of_warp((rows + kConsumerThreads / 32 - 1) / (kConsumerThreads / 32)),
        width(group < plan.column_step ? group : plan.column_step),
        groups(plan.column_step / width),
        lanes(width / 4),
        crosses(plan.exchange > 1 || rows % plan.rows.time != 0),
        tiles(plan.exchange > 1 ? plan.exchange : 1),
        parts(tiles * most_blocks(plan.rows.time, rows, plan.splits)),
        over(1.0f / static_cast<float>(plan.rows.time * width * tiles)),
        by_times(plan.rows.time),
        by_samples(plan.rows.samples),
        by_lanes(lanes > 0 ? lanes : 1),
        by_groups(groups),
        by_rows(rows) {}
};

// Where weights come from: packed, rows along K or along N, or as they lie in the parameter (in_place.cuh).
enum WeightLayout { kAlongK, kAlongN, kInPlace };

struct ConvArgs {
  ConvPlan plan;
  int64_t batch, out_length, outputs;
  int64_t pitch;  // of an output row: `outputs`, or half of them, of which the second goes to `more_out`
  Addends addends;
  bool float_bias;
  void *out, *more_out;  // with a normalisation `out` may be null
  Normalisation normalisation;
  Shares shares;
  int prefetched;  // stages of weights that are loaded before the grid dependency resolves
  bool release;    // trigger the dependent launch once the mainloop is done
  unsigned blocks;
  int beyond;  // channels by which the last chunk of the first of two tensors reaches beyond it: zeros, times whatever
  int boxes, weights;             // stages of the two circular buffers
  uint32_t box_bytes, box_stage;  // what TMA writes, and the distance from stage to stage
  uint32_t weight_bytes;          // of a stage
  Shortcut shortcut;
  int shortcut_parts;  // of its weight
  InPlaceStage in_place;
  int taps;  // planes of weights, before as many of their low halves or second parts
};

// Operands that are pairs of float16 numbers, or float32 in full (`in_full`): what the MMAs take, and of what type results
// are.
struct TwoHalves {};
struct InFull {};
template <class T>
constexpr bool kHalves = std::is_same_v<T, TwoHalves>;
template <class T>
constexpr bool kInFull = std::is_same_v<T, InFull>;
template <class T>
using Result = std::conditional_t<kHalves<T> || kInFull<T>, float, T>;
template <class T>
using Operand = std::conditional_t<kHalves<T>, __half, Result<T>>;

constexpr int kRowBytes = 128;  // of an operand's row in a stage, swizzled over 8 rows: what a step contracts of it
template <class T>
constexpr int kStepChannels = kRowBytes / sizeof(Operand<T>);

struct TensorMaps {
  CUtensorMap x, more_x, weights, shortcut;
};

constexpr int kMaxBoxes = 4, kMaxWeights = 9;
constexpr int kFewWeights = 4;  // stages that come in the time of a wait

// The barriers of the two circular buffers between the producer and the consumer warpgroups, boxes of A and weights,
// and of what is sent.
struct Pipelines {
  Pipeline<kMaxBoxes> boxes;
  Pipeline<kMaxWeights> weights;
  uint64_t sums, moments;  // the block's own sums and those of the cluster's others are there; all moments are
};

template <int kColumns>
struct ConvShape {
  // Two blocks of a small tile share a multiprocessor: one multiplies while the other fills its stages or stores.
  static constexpr int kBlocks = kColumns <= 128 ? 2 : 1;
  // Boxes of x, of a size that the plan gives, then weights, then the barriers of both buffers.
  static constexpr uint32_t kBoxesBytes = 64 * 1024, kWeightBytes = kColumns * kRowBytes;
  static constexpr int kWeights = kColumns == 64 ? 6 : kColumns == 128 ? 3 : 4;
  static constexpr int bytes(int weights) { return kBoxesBytes + weights * kWeightBytes + sizeof(Pipelines); }
  static constexpr int kBytes = bytes(kWeights);
  static constexpr int kStride = kColumns + 8, kTile = kTileRows * kStride;
  static_assert(kTileRows * kStride * 4 <= kBytes - sizeof(Pipelines), "the tile of sums replaces the stages");
  static_assert(2 * kTile * 4 <= bytes(kMaxWeights) - sizeof(Pipelines) || kColumns > 128,
                "and so do two, with a shortcut");
  static_assert(kBlocks * (kBytes + 1024) <= 228 * 1024, "that many blocks find their place");
};

// Which tile a block works on. 32-bit arithmetic: `serves` keeps the counts small, and a division is short.
struct TileCoord {
  int rank, phase, first_sample, first_time, first_column;
  int first_peer;  // rank 0 of this tile among the cluster's blocks
  __device__ TileCoord(const ConvPlan& plan, int columns, unsigned index) {
    const unsigned splits = plan.splits, column_tiles = static_cast<unsigned>(plan.column_tiles);
    const unsigned per_sample = plan.rows.per_sample;
    rank = index % splits, index /= splits;
    const unsigned column_tile = index % column_tiles;
    first_column = column_tile * columns, index /= column_tiles;
    first_peer = plan.exchange > 1 ? column_tile % plan.exchange * splits : 0;
    phase = plan.phases == 1 ? 0 : index & 1, index = plan.phases == 1 ? index : index >> 1;
    first_sample = index / per_sample * plan.rows.samples;
    first_time = index % per_sample * plan.rows.time;
  }
};

// What a block contracts: boxes of A, one after the other, each for `terms` steps of B, and one of the shortcut's. Of
// weights that are read in place, boxes alone are the same (in_place.cuh).
struct Work {
  int first, count;  // boxes
  int parts, side;   // of a weight, each of which is a step; of the shortcut's, or 0
  int terms;         // that a box serves, times the weight's parts
  int start, delta;  // where the first term's rows begin in a box, in bytes, and from term to term
  int shortcut;      // where the shortcut's begin
  int of_round;      // boxes of each of `rounds`

  __device__ Work(const ConvArgs& args, const TileCoord& coord, int rounds, int parts, int side)
      : parts(parts), side(side) {
    const ConvPlan& plan = args.plan;
    const int* const shift = plan.shift[0];
    const int all = plan.terms[coord.phase], bytes = plan.rows.samples * kRowBytes;
    terms = (plan.together ? all : 1) * parts;
    start = plan.together ? (shift[0] - plan.lowest) * bytes : 0;
    delta = plan.together ? (shift[1] - shift[0]) * bytes : 0;
    shortcut = -plan.lowest * bytes;
    of_round = plan.together ? plan.chunks : all * plan.chunks;
    const int2 mine = share(of_round * rounds, coord.rank, plan.splits);
    first = mine.x, count = mine.y - mine.x;
  }
};

// Behind the main loop: the tile takes the place of what the other warpgroup still reads, and so, in a cluster, does what
// other blocks send.
template <bool kSplit>
__device__ __forceinline__ void leave_stages(const ConvArgs& args) {
  if (args.release) trigger_dependent_launch();
  ptx::sync_threads(1, kConsumerThreads);
  if constexpr (kSplit) ptx::cluster_arrive_relaxed();
}

// Four neighbouring elements, as they move.
template <class T>
using FourBits = std::conditional_t<sizeof(T) == 4, uint4, uint2>;

template <class T>
__device__ __forceinline__ float4 widen_four(FourBits<T> bits) {
  const auto& four = reinterpret_cast<const Vector<T, 4>&>(bits);
  return make_float4(widen(four.data[0]), widen(four.data[1]), widen(four.data[2]), widen(four.data[3]));
}

// The compiler converts what was loaded behind this call, not behind the load, where it would wait for it.
__device__ __forceinline__ void converted_from_here(uint2& bits) { asm volatile("" : "+r"(bits.x), "+r"(bits.y)); }
__device__ __forceinline__ void converted_from_here(uint4& bits) {
  asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
}

// Four neighbouring elements of a tensor that may be null, as loaded. Nothing waits for them before `values`, so that
// many loads can be in flight.
template <class T>
struct Bits {
  FourBits<T> bits;
  __device__ __forceinline__ void load(const void* tensor, int64_t n) {
    if (tensor) bits = *reinterpret_cast<const FourBits<T>*>(static_cast<const T*>(tensor) + n);
  }
  __device__ __forceinline__ float4 values(const void* tensor, float otherwise) const {
    FourBits<T> loaded = bits;
    converted_from_here(loaded);
    return tensor ? widen_four<T>(loaded) : make_float4(otherwise, otherwise, otherwise, otherwise);
  }
};
// The same of float32, if `is_float`, or T.
struct ParameterBits {
  float4 bits;
  template <class T>
  __device__ __forceinline__ void load(const void* tensor, bool is_float, int64_t n) {
    if (!tensor) return;
    if (sizeof(T) == 4 || is_float) {
      bits = *reinterpret_cast<const float4*>(static_cast<const float*>(tensor) + n);
    } else {
      const float2 half = *reinterpret_cast<const float2*>(static_cast<const T*>(tensor) + n);
      bits.x = half.x, bits.y = half.y;
    }
  }
  template <class T>
  __device__ __forceinline__ float4 values(const void* tensor, bool is_float, float otherwise) const {
    if (!tensor) return make_float4(otherwise, otherwise, otherwise, otherwise);
    if constexpr (sizeof(T) == 4)
      return bits;
    else
      return is_float ? bits : widen_four<T>(make_uint2(__float_as_uint(bits.x), __float_as_uint(bits.y)));
  }
};

// Rounded to T, as they move.
template <class T>
__device__ __forceinline__ FourBits<T> narrow_four(const float (&x)[4]) {
  if constexpr (sizeof(T) == 4)
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
  else
    return make_uint2(pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3]));
}

template <class T>
__device__ __forceinline__ void store_four(void* values, int64_t n, const float (&x)[4]) {
  *reinterpret_cast<FourBits<T>*>(static_cast<T*>(values) + n) = narrow_four<T>(x);
}

}  // namespace dpa::kernels::conv1d
