// gather and scatter: out[b, phases j + p, n] = sum over terms i and channels c of
//                     x[b, stride j + shift[p][i], c] weight[tap[p][i]][n, c]    (gather: rows of weights along K)
//                                               or    weight[tap[p][i]][c, n]    (scatter: rows of weights along N)
//
// An output tile is 128 rows (sample, j) by kColumns channels n. A step contracts 64 channels of one term: the copy
// engine brings a box of 64 channels x `time` times x `samples` samples, shifted by the tap, with zeros where it leaves
// the sample, which is the padding; no patch matrix exists anywhere. Neighbouring blocks of a cluster share a tile's
// steps.
//
// cluster  one output tile; its blocks take consecutive shares of the steps and each finishes an equal share of the
// rows block    one warp copies, two warpgroups multiply 64 rows x kColumns each, accumulators in registers epilogue
// sums go to shared memory, each block adds its rows of all the cluster's tiles in rank order, then bias and
//          residual, and stores 16 bytes a thread, neighbouring threads side by side
#include "kernels/conv1d/conv1d.h"
#include "kernels/conv1d/launch.cuh"
#include "kernels/conv1d/ring.cuh"
#include "kernels/conv1d/tensor_map.h"

namespace dpa::kernels::conv1d {
namespace {

struct ProductArgs {
  ProductPlan plan;
  int64_t batch, out_length, outputs;
  Addends addends;
  bool float_bias;
  void* out;
};

template <int kColumns>
struct ProductShape {
  // Two blocks of the narrow tile share a multiprocessor: one multiplies while the other fills its ring or finishes.
  static constexpr int kBlocks = kColumns == 128 ? 2 : 1;
  static constexpr int kStages = kColumns == 128 ? 3 : 4;
  static constexpr uint32_t kRowBytes = kTileRows * kChunk * 2;
  static constexpr uint32_t kStageBytes = kRowBytes + kColumns * kChunk * 2;
  static constexpr int kStride = kColumns + 8;
  static constexpr int kBytes = kStages * kStageBytes + kAlignment;
  static_assert(kTileRows * kStride * 4 <= kStages * kStageBytes, "the tile of sums takes the ring's place");
};

// Which tile a block works on.
struct Place {
  int rank, phase, first_sample, first_time, first_column;
  __device__ Place(const ProductPlan& plan, int columns) {
    int64_t index = blockIdx.x;
    rank = static_cast<int>(index % plan.splits), index /= plan.splits;
    first_column = static_cast<int>(index % plan.column_tiles) * columns, index /= plan.column_tiles;
    phase = static_cast<int>(index % plan.phases), index /= plan.phases;
    first_sample = static_cast<int>(index / plan.rows.per_sample) * plan.rows.samples;
    first_time = static_cast<int>(index % plan.rows.per_sample) * plan.rows.time;
  }
};

template <int kColumns, bool kScatter, int kStages>
__device__ void copy_tiles(const CUtensorMap* x_map, const CUtensorMap* w_map, const ProductPlan& plan,
                           const Place& place, uint32_t ring, Barriers<kStages>& barriers, int2 steps) {
  using Shape = ProductShape<kColumns>;
  const uint32_t bytes = plan.rows.time * plan.rows.samples * kChunk * 2 + kColumns * kChunk * 2;
  Position<kStages> at;
  for (int step = steps.x; step < steps.y; ++step, at.advance()) {
    const int term = step / plan.chunks, channel = step % plan.chunks * kChunk;
    const int tap = plan.tap[place.phase][term];
    const uint32_t full = acquire(barriers, at, bytes), stage = ring + at.stage * Shape::kStageBytes;
    copy_box(stage, x_map, channel, place.first_time * plan.stride + plan.shift[place.phase][term], place.first_sample,
             full);
    const uint32_t weights = stage + Shape::kRowBytes;
    if constexpr (kScatter) {
      for (int i = 0; i < kColumns / 64; ++i)
        copy_box(weights + i * kChunk * 128, w_map, place.first_column + i * 64, channel, tap, full);
    } else {
      copy_box(weights, w_map, channel, place.first_column, tap, full);
    }
  }
}

template <class T, int kColumns, bool kScatter, int kStages>
__device__ __forceinline__ void multiply_tiles(uint32_t ring, Barriers<kStages>& barriers, int steps, float* tile) {
  using Shape = ProductShape<kColumns>;
  const int group = threadIdx.x / 128;
  float sums[kColumns / 2];
  consume(barriers, steps, [&](int stage, bool first) {
    const uint32_t rows = ring + stage * Shape::kStageBytes, weights = rows + Shape::kRowBytes;
    const uint64_t a = operand(rows + group * 64 * 128, 16, 1024, Swizzle::k128);
    const uint64_t b = operand(weights, kScatter ? kChunk * 128 : 16, 1024, Swizzle::k128);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      product<T, kColumns, 0, kScatter>(sums, a + k * 2, b + k * (kScatter ? 128 : 2), !(first && k == 0));
  });
  ptx::sync_threads(1, kMultipliers);  // the tile takes the place of what the other warpgroup still read
  store_sums<kColumns, Shape::kStride>(tile, sums, [](int j) { return 8 * j; });
}

// Where the output's row that belongs to row `row` of the tile begins, or -1 where there is none.
__device__ __forceinline__ int64_t row_offset(const ProductArgs& args, const Place& place, int row) {
  const ProductPlan& plan = args.plan;
  const int64_t sample = place.first_sample + row / plan.rows.time;
  const int64_t time = static_cast<int64_t>(place.first_time + row % plan.rows.time) * plan.phases + place.phase;
  const bool there = row < plan.rows.time * plan.rows.samples && sample < args.batch && time < args.out_length;
  return there ? (sample * args.out_length + time) * args.outputs : -1;
}

// Eight neighbouring sums, those of all the cluster's blocks added in rank order.
__device__ __forceinline__ void gather_sums(float (&value)[8], const float* from, int splits) {
  if (splits == 1) {
    *reinterpret_cast<float4*>(value) = *reinterpret_cast<const float4*>(from);
    *reinterpret_cast<float4*>(value + 4) = *reinterpret_cast<const float4*>(from + 4);
    return;
  }
  const uint32_t address = ptx::shared_address(from);
#pragma unroll
  for (float& v : value) v = 0;
#pragma unroll 4
  for (int peer = 0; peer < splits; ++peer) {
    const float4 low = load_peer(address, peer), high = load_peer(address + 16, peer);
    value[0] += low.x, value[1] += low.y, value[2] += low.z, value[3] += low.w;
    value[4] += high.x, value[5] += high.y, value[6] += high.z, value[7] += high.w;
  }
}

// A thread's eight columns of kAtOnce rows: what is read from memory for all of them is asked for first.
template <class T, int kColumns>
__device__ void finish_rows(const ProductArgs& args, const Place& place, const float* tile) {
  constexpr int kStride = ProductShape<kColumns>::kStride, kVectors = kColumns / 8;
  constexpr int kAtOnce = 4, kStep = kMultipliers / kVectors;
  const int thread = threadIdx.x, share = kTileRows / args.plan.splits, end = (place.rank + 1) * share;
  const int column = thread % kVectors * 8,
            count = static_cast<int>(min(int64_t{8}, args.outputs - place.first_column - column));
  if (count <= 0) return;
  const bool whole = args.outputs % 8 == 0;
  float bias[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t n = place.first_column + column + i;
    bias[i] = !args.addends.bias || i >= count ? 0.f
              : args.float_bias                ? static_cast<const float*>(args.addends.bias)[n]
                                               : widen(static_cast<const T*>(args.addends.bias)[n]);
  }
  T* out = static_cast<T*>(args.out) + place.first_column + column;
  const T* residual = static_cast<const T*>(args.addends.residual);
  if (residual) residual += place.first_column + column;
  for (int row = place.rank * share + thread / kVectors; row < end; row += kAtOnce * kStep) {
    int64_t offset[kAtOnce];
    alignas(16) T before[kAtOnce][8];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      offset[r] = row + r * kStep < end ? row_offset(args, place, row + r * kStep) : -1;
      if (!residual || offset[r] < 0) continue;
      if (whole) *reinterpret_cast<uint4*>(before[r]) = *reinterpret_cast<const uint4*>(residual + offset[r]);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (!whole && i < count) before[r][i] = residual[offset[r] + i];
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      if (offset[r] < 0) continue;
      float value[8];
      gather_sums(value, tile + (row + r * kStep) * kStride + column, args.plan.splits);
      alignas(16) T rounded[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float sum = value[i] + bias[i];
        rounded[i] = narrow<T>(residual ? sum + widen(before[r][i]) : sum);
      }
      if (whole) *reinterpret_cast<uint4*>(out + offset[r]) = *reinterpret_cast<const uint4*>(rounded);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (!whole && i < count) out[offset[r] + i] = rounded[i];
    }
  }
}

template <class T, int kColumns, bool kScatter>
__global__ void __launch_bounds__(kThreads, ProductShape<kColumns>::kBlocks)
    product_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                   const __grid_constant__ ProductArgs args) {
  using Shape = ProductShape<kColumns>;
  extern __shared__ uint8_t shared[];
  __shared__ Barriers<Shape::kStages> barriers;
  uint8_t* memory = shared + (kAlignment - ptx::shared_address(shared) % kAlignment) % kAlignment;
  const uint32_t ring = ptx::shared_address(memory);
  const Place place(args.plan, kColumns);
  const int2 steps = share(args.plan.terms[place.phase] * args.plan.chunks, place.rank, args.plan.splits);
  if (threadIdx.x == 0) {
    prefetch_map(&x_map);
    prefetch_map(&w_map);
    barriers.init();
  }
  __syncthreads();
  const bool alone = args.plan.splits == 1;
  if (threadIdx.x >= kMultipliers) {
    if (threadIdx.x == kMultipliers)
      copy_tiles<kColumns, kScatter>(&x_map, &w_map, args.plan, place, ring, barriers, steps);
    __syncwarp();
    if (!alone) cluster_sync(), cluster_sync();
  } else {
    float* tile = reinterpret_cast<float*>(memory);
    multiply_tiles<T, kColumns, kScatter>(ring, barriers, steps.y - steps.x, tile);
    alone ? ptx::sync_threads(1, kMultipliers) : cluster_sync();
    finish_rows<T, kColumns>(args, place, tile);
    if (!alone) cluster_sync();  // nobody leaves while a peer still reads its tile
  }
}

template <class T, int kColumns, bool kScatter>
cudaError_t launch_product(const CUtensorMap& x_map, const CUtensorMap& w_map, const ProductArgs& args,
                           cudaStream_t stream) {
  const auto kernel = product_kernel<T, kColumns, kScatter>;
  const ProductPlan& plan = args.plan;
  return launch_cluster(kernel, plan.rows.count * plan.phases * plan.column_tiles * plan.splits, plan.splits,
                        ProductShape<kColumns>::kBytes, stream, x_map, w_map, args);
}

template <bool kScatter>
cudaError_t run(const Conv1d& conv, const ProductPlan& plan, const void* x, const void* weight, const Addends& addends,
                void* out, cudaStream_t stream) {
  const int64_t x_length = kScatter ? conv.narrow_length : conv.wide_length;
  const int64_t x_channels = kScatter ? conv.narrow_channels : conv.wide_channels;
  CUtensorMap x_map, w_map;
  const Boxes x_boxes{conv.dtype,     x,      conv.batch, x_length, padded(x_channels), plan.rows.samples,
                      plan.rows.time, kChunk, plan.stride};
  const Boxes w_boxes{conv.dtype,
                      weight,
                      conv.taps,
                      conv.narrow_channels,
                      padded(conv.wide_channels),
                      1,
                      kScatter ? kChunk : plan.tile_columns,
                      64,
                      1};
  if (const auto error = make_map(x_boxes, &x_map)) return error;
  if (const auto error = make_map(w_boxes, &w_map)) return error;
  const ProductArgs args{plan,
                         conv.batch,
                         kScatter ? conv.wide_length : conv.narrow_length,
                         kScatter ? conv.wide_channels : conv.narrow_channels,
                         addends,
                         addends.bias_dtype == DType::kFloat32,
                         out};
  return dispatch_half(conv.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return plan.tile_columns == 256 ? launch_product<T, 256, kScatter>(x_map, w_map, args, stream)
                                    : launch_product<T, 128, kScatter>(x_map, w_map, args, stream);
  });
}

}  // namespace

cudaError_t gather(const Conv1d& conv, const void* wide, const void* weight, const Addends& addends, void* narrow,
                   cudaStream_t stream) {
  return run<false>(conv, plan_gather(conv, multiprocessors()), wide, weight, addends, narrow, stream);
}

cudaError_t scatter(const Conv1d& conv, const void* narrow, const void* weight, const Addends& addends, void* wide,
                    cudaStream_t stream) {
  return run<true>(conv, plan_scatter(conv, multiprocessors()), narrow, weight, addends, wide, stream);
}

}  // namespace dpa::kernels::conv1d
