// gather and scatter: out[b, phases j + p, n] = sum over terms i and channels c of
//                     x[b, stride j + shift[p][i], c] weight[tap[p][i]][n, c]    (gather: rows of weights along K)
//                                               or    weight[tap[p][i]][c, n]    (scatter: rows of weights along N)
//
// An output tile is 128 rows (sample, j) by kColumns channels n. A step contracts 64 channels of one term: the copy
// engine brings a box of 64 channels x `time` times x `samples` samples, shifted by the tap, with zeros where it leaves
// the sample, which is the padding; no patch matrix exists anywhere. Neighbouring blocks of a cluster share a tile's
// steps.
//
// cluster  one output tile; its blocks take consecutive shares of the steps, and each finishes the rows of an equal
// share
//          of its warps
// block    one warp copies, two warpgroups multiply 64 rows x kColumns each, accumulators in registers
// epilogue sums go to shared memory; a warp takes a row at a time, four neighbouring columns a lane: it adds the sums
// of
//          all the cluster's blocks in rank order, then bias and residual, and stores
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
  static constexpr int kBytes = kStages * kStageBytes + kAlignment;
  static constexpr int kStride = kColumns + 8;
  static_assert(kTileRows * kStride * 4 <= kStages * kStageBytes, "the tile of sums takes the ring's place");
};

// Which tile a block works on. 32-bit arithmetic: `serves` keeps the counts small, and a division is short.
struct Place {
  int rank, phase, first_sample, first_time, first_column;
  __device__ Place(const ProductPlan& plan, int columns) {
    unsigned index = blockIdx.x;
    const unsigned splits = plan.splits, column_tiles = static_cast<unsigned>(plan.column_tiles);
    const unsigned per_sample = plan.rows.per_sample;
    rank = index % splits, index /= splits;
    first_column = index % column_tiles * columns, index /= column_tiles;
    phase = plan.phases == 1 ? 0 : index & 1, index = plan.phases == 1 ? index : index >> 1;
    first_sample = index / per_sample * plan.rows.samples;
    first_time = index % per_sample * plan.rows.time;
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
__device__ __forceinline__ int64_t row_offset(const ProductArgs& args, const Place& place, unsigned row) {
  const ProductPlan& plan = args.plan;
  const unsigned times = plan.rows.time;
  const int sample = place.first_sample + row / times;
  const int64_t time = static_cast<int64_t>(place.first_time + row % times) * plan.phases + place.phase;
  const bool there = row < times * plan.rows.samples && sample < args.batch && time < args.out_length;
  return there ? (sample * args.out_length + time) * args.outputs : -1;
}

// Adds bias and residual to `kCount` neighbouring sums and stores them, at element `to` of the output.
template <class T, int kCount>
__device__ __forceinline__ void finish(const ProductArgs& args, const float* sums, const float* bias, int64_t to) {
  struct alignas(kCount * 2) Vector {
    T element[kCount];
  };
  Vector out, before;
  const T* residual = static_cast<const T*>(args.addends.residual);
  if (residual) before = *reinterpret_cast<const Vector*>(residual + to);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float sum = sums[i] + bias[i];
    if (residual) sum += widen(before.element[i]);
    out.element[i] = narrow<T>(sum);
  }
  *reinterpret_cast<Vector*>(static_cast<T*>(args.out) + to) = out;
}

// Four neighbouring columns, from `column` of the tile on, of the warp's rows: `rows` of them from `first` on.
template <class T, int kColumns>
__device__ __forceinline__ void finish_columns(const ProductArgs& args, const Place& place, const float* tile,
                                               int column, int first, int rows, int64_t lane_offset) {
  const int n = place.first_column + column, outputs = static_cast<int>(args.outputs), splits = args.plan.splits;
  const bool whole = outputs % 4 == 0;
  float bias[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    bias[i] = !args.addends.bias || n + i >= outputs ? 0.f
              : args.float_bias                      ? static_cast<const float*>(args.addends.bias)[n + i]
                                                     : widen(static_cast<const T*>(args.addends.bias)[n + i]);
  const uint32_t from = ptx::shared_address(tile + first * ProductShape<kColumns>::kStride + column);
#pragma unroll 4
  for (int r = 0; r < rows; ++r) {
    const uint32_t address = from + r * ProductShape<kColumns>::kStride * 4;
    float4 sum = splits == 1 ? load_shared(address) : load_shared_of(peer_address(address, 0));
#pragma unroll 4
    for (int peer = 1; peer < splits; ++peer) {
      const float4 v = load_shared_of(peer_address(address, peer));
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    const float value[4] = {sum.x, sum.y, sum.z, sum.w};
    const int64_t row = __shfl_sync(~0u, lane_offset, r);
    if (row < 0 || n >= outputs) continue;
    if (whole) {
      finish<T, 4>(args, value, bias, row + n);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (n + i < outputs) finish<T, 1>(args, value + i, bias + i, row + n + i);
    }
  }
}

template <class T, int kColumns>
__device__ __forceinline__ void finish_rows(const ProductArgs& args, const Place& place, const float* tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = kTileRows / (kMultipliers / 32) / args.plan.splits;
  const int first = (place.rank * (kMultipliers / 32) + warp) * rows;
  const int64_t lane_offset = row_offset(args, place, first + lane);  // of the rows, one a lane
#pragma unroll
  for (int half = 0; half < kColumns / 128; ++half)
    finish_columns<T, kColumns>(args, place, tile, half * 128 + lane * 4, first, rows, lane_offset);
}

template <class T, int kColumns, bool kScatter>
__global__ void __launch_bounds__(kThreads, ProductShape<kColumns>::kBlocks)
    product_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                   const __grid_constant__ ProductArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it: see `supported`
  using Shape = ProductShape<kColumns>;
  extern __shared__ uint8_t shared[];
  __shared__ Barriers<Shape::kStages> barriers;
  uint8_t* memory = shared + (kAlignment - ptx::shared_address(shared) % kAlignment) % kAlignment;
  float* tile = reinterpret_cast<float*>(memory);
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
    multiply_tiles<T, kColumns, kScatter>(ring, barriers, steps.y - steps.x, tile);
    alone ? __syncwarp() : cluster_sync();  // alone, a warp finishes its own rows
    finish_rows<T, kColumns>(args, place, tile);
    if (!alone) cluster_sync();  // nobody leaves while a peer still reads its tile
  }
#endif
}

template <class T, int kColumns, bool kScatter>
cudaError_t launch_product(const CUtensorMap& x_map, const CUtensorMap& w_map, const ProductArgs& args,
                           cudaStream_t stream) {
  const auto kernel = product_kernel<T, kColumns, kScatter>;
  const ProductPlan& plan = args.plan;
  const Launch launch{plan.rows.count * plan.phases * plan.column_tiles * plan.splits, kThreads, plan.splits,
                      ProductShape<kColumns>::kBytes, stream};
  return launch_cluster(kernel, launch, x_map, w_map, args);
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

bool supported() {
#ifdef DPA_SM90A
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
#else
  return false;
#endif
}

cudaError_t gather(const Conv1d& conv, const void* wide, const void* weight, const Addends& addends, void* narrow,
                   cudaStream_t stream) {
  return run<false>(conv, plan_gather(conv, multiprocessors()), wide, weight, addends, narrow, stream);
}

cudaError_t scatter(const Conv1d& conv, const void* narrow, const void* weight, const Addends& addends, void* wide,
                    cudaStream_t stream) {
  return run<true>(conv, plan_scatter(conv, multiprocessors()), narrow, weight, addends, wide, stream);
}

}  // namespace dpa::kernels::conv1d
