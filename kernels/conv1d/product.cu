// gather and scatter: out[b, phases j + p, n] = sum over terms i and channels c of
//                     x[b, stride j + shift[p][i], c] weight[tap[p][i]][n, c]    (gather: rows of weights along K)
//                                               or    weight[tap[p][i]][c, n]    (scatter: rows of weights along N)
//
// An output tile is 128 rows (sample, j) by kColumns channels n. A step contracts 64 channels of one term: the copy
// engine brings a box of 64 channels x `time` times x `samples` samples, shifted by the tap, with zeros where it leaves
// the sample, which is the padding; no patch matrix exists anywhere. Neighbouring blocks of a cluster share a tile's
// steps.
//
// cluster  one output tile; its blocks take consecutive shares of the steps, and each finishes an equal share of the
// rows block    one warp copies, two warpgroups multiply 64 rows x kColumns each, accumulators in registers end sums go
// to shared memory; finish.cuh adds up those of the cluster's blocks and stores them, normalise.cuh
//          stores what a normalisation makes of them
#include "kernels/conv1d/finish.cuh"
#include "kernels/conv1d/normalise.cuh"
#include "kernels/conv1d/tensor_map.h"

namespace dpa::kernels::conv1d {
namespace {

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

// kPasses: of the normalisation, or 0 without one.
template <class T, int kColumns, bool kScatter, int kPasses>
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
  wait_for_predecessor();
  const bool alone = args.plan.splits == 1;
  if (threadIdx.x >= kMultipliers) {
    if (threadIdx.x == kMultipliers)
      copy_tiles<kColumns, kScatter>(&x_map, &w_map, args.plan, place, ring, barriers, steps);
    __syncwarp();
    if (!alone) cluster_sync(), cluster_sync();
  } else {
    multiply_tiles<T, kColumns, kScatter>(ring, barriers, steps.y - steps.x, tile);
    if constexpr (kPasses > 0) {
      alone ? ptx::sync_threads(1, kMultipliers) : cluster_sync();
      finish_groups<T, kColumns, kPasses>(args, place, tile);
    } else {
      alone ? __syncwarp() : cluster_sync();  // alone, a warp finishes its own rows
      finish_rows<T, kColumns>(args, place, tile);
    }
    if (!alone) cluster_sync();  // nobody leaves while a peer still reads its tile
  }
#endif
}

template <class T, int kColumns, bool kScatter, int kPasses = 0>
cudaError_t launch_product(const CUtensorMap& x_map, const CUtensorMap& w_map, const ProductArgs& args,
                           cudaStream_t stream) {
  const auto kernel = product_kernel<T, kColumns, kScatter, kPasses>;
  const ProductPlan& plan = args.plan;
  const Launch launch{plan.rows.count * plan.phases * plan.column_tiles * plan.splits, kThreads, plan.splits,
                      ProductShape<kColumns>::kBytes, stream};
  return launch_cluster(kernel, launch, x_map, w_map, args);
}

template <class T, int kColumns>
cudaError_t launch_normalised(int passes, const CUtensorMap& x_map, const CUtensorMap& w_map, const ProductArgs& args,
                              cudaStream_t stream) {
  switch (passes) {
    case 1: return launch_product<T, kColumns, false, 1>(x_map, w_map, args, stream);
    case 2: return launch_product<T, kColumns, false, 2>(x_map, w_map, args, stream);
    case 4: return launch_product<T, kColumns, false, 4>(x_map, w_map, args, stream);
    case 8: return launch_product<T, kColumns, false, 8>(x_map, w_map, args, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <bool kScatter>
cudaError_t run(const Conv1d& conv, const ProductPlan& plan, const void* x, const void* weight, const Addends& addends,
                void* out, const Normalisation& normalisation, cudaStream_t stream) {
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
                         out,
                         normalisation};
  return dispatch_half(conv.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!kScatter) {
      if (normalisation.out) {
        const int passes = static_cast<int>(conv.narrow_length * normalisation.group / 128);
        return plan.tile_columns == 256 ? launch_normalised<T, 256>(passes, x_map, w_map, args, stream)
                                        : launch_normalised<T, 128>(passes, x_map, w_map, args, stream);
      }
    }
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
  return run<false>(conv, plan_gather(conv, multiprocessors()), wide, weight, addends, narrow, {}, stream);
}

bool normalises(const Conv1d& conv, int group) { return normalises(conv, plan_gather(conv, multiprocessors()), group); }

cudaError_t gather_normalised(const Conv1d& conv, const void* wide, const void* weight, const Addends& addends,
                              void* narrow, const Normalisation& normalisation, cudaStream_t stream) {
  return run<false>(conv, plan_gather(conv, multiprocessors()), wide, weight, addends, narrow, normalisation, stream);
}

cudaError_t scatter(const Conv1d& conv, const void* narrow, const void* weight, const Addends& addends, void* wide,
                    cudaStream_t stream) {
  return run<true>(conv, plan_scatter(conv, multiprocessors()), narrow, weight, addends, wide, {}, stream);
}

}  // namespace dpa::kernels::conv1d
