// weight_gradient: gradient[i, j, k] = sum over b, t of narrow[b, t, i] wide[b, stride t + k - padding, j]
//
// A tile is 128 channels i by kWide channels j by all taps k: the taps are columns of one product, so that a row of the
// tile is one piece of the gradient's memory. A step contracts up to 64 rows (b, t): the copy engine brings the narrow
// rows once and the wide rows once a tap, each shifted by it. Both operands' rows run along M and N.
//
// cluster  one tile; its blocks take consecutive shares of the rows and each finishes an equal share of the channels i
// block    one warp copies, two warpgroups multiply 64 channels i x all columns each
// epilogue sums go to shared memory, each block adds its channels of all the cluster's tiles in rank order and stores
//          them, neighbouring threads neighbouring elements
#include "kernels/conv1d/conv1d.h"
#include "kernels/conv1d/launch.cuh"
#include "kernels/conv1d/tensor_map.h"

namespace dpa::kernels::conv1d {
namespace {

struct GradientArgs {
  GradientPlan plan;
  int64_t narrow_channels, wide_channels;
  int stride, padding;
  bool float_gradient;
  void* gradient;
};

// Boxes of the wide tensor are 32 channels across; kAtoms of them make a tap's share of the columns.
template <int kTaps, int kAtoms>
struct GradientShape {
  static constexpr int kWide = kAtoms * 32;
  static constexpr int kColumns = kTaps * kWide;
  static constexpr uint32_t kNarrowBox = kChunk * 128, kWideBox = kChunk * 64;
  static constexpr uint32_t kStageBytes = 2 * kNarrowBox + kTaps * kAtoms * kWideBox;
  static constexpr int kStages = 200 * 1024 / kStageBytes;
  // A tap's columns are 6 words apart from the next tap's, so that reading across taps meets few bank conflicts.
  static constexpr int kTapStride = kWide + 6;
  static constexpr int kStride = (kTaps * kTapStride + 31) / 32 * 32 + 8;
  static constexpr int kBytes = kStages * kStageBytes + kAlignment;
  static_assert(kTileRows * kStride * 4 <= kStages * kStageBytes, "the tile of sums takes the ring's place");
  static_assert(kStageBytes % kAlignment == 0, "stages stay aligned");
};

template <class Shape, int kTaps, int kAtoms>
__device__ void copy_rows(const CUtensorMap* narrow_map, const CUtensorMap* wide_map, const GradientArgs& args,
                          int first_narrow, int first_wide, uint32_t ring, Barriers<Shape::kStages>& barriers,
                          int2 steps) {
  const RowTiles& rows = args.plan.rows;
  const uint32_t bytes = rows.time * rows.samples * (2 * 128 + kTaps * kAtoms * 64);
  Position<Shape::kStages> at;
  for (int step = steps.x; step < steps.y; ++step, at.advance()) {
    const int sample = step / rows.per_sample * rows.samples, time = step % rows.per_sample * rows.time;
    const uint32_t full = acquire(barriers, at, bytes), stage = ring + at.stage * Shape::kStageBytes;
    for (int i = 0; i < 2; ++i)
      copy_box(stage + i * Shape::kNarrowBox, narrow_map, first_narrow + i * 64, time, sample, full);
    const uint32_t wide = stage + 2 * Shape::kNarrowBox;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
#pragma unroll
      for (int i = 0; i < kAtoms; ++i)
        copy_box(wide + (k * kAtoms + i) * Shape::kWideBox, wide_map, first_wide + i * 32,
                 time * args.stride + k - args.padding, sample, full);
    }
  }
}

template <class T, class Shape>
__device__ __forceinline__ void multiply_rows(uint32_t ring, Barriers<Shape::kStages>& barriers, int steps,
                                              float* tile) {
  const int group = threadIdx.x / 128;
  float sums[Shape::kColumns / 2];
  consume(barriers, steps, [&](int stage, bool first) {
    const uint32_t narrow = ring + stage * Shape::kStageBytes, wide = narrow + 2 * Shape::kNarrowBox;
    const uint64_t a = operand(narrow + group * Shape::kNarrowBox, Shape::kNarrowBox, 1024, Swizzle::k128);
    const uint64_t b = operand(wide, Shape::kWideBox, 512, Swizzle::k64);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      product<T, Shape::kColumns, 1, 1>(sums, a + k * 128, b + k * 64, !(first && k == 0));
  });
  ptx::sync_threads(1, kMultipliers);  // the tile takes the place of what the other warpgroup still read
  store_sums<Shape::kColumns, Shape::kStride>(
      tile, sums, [](int j) { return 8 * j / Shape::kWide * Shape::kTapStride + 8 * j % Shape::kWide; });
}

// A warp a row of the tile, which is one piece of the gradient's memory.
template <class T, class Shape, int kTaps>
__device__ void finish_channels(const GradientArgs& args, int rank, int first_narrow, int first_wide,
                                const float* tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = kTileRows / args.plan.splits;
  const int64_t left = min(args.wide_channels - first_wide, int64_t{Shape::kWide}) * kTaps;
  for (int row = rank * share + warp; row < (rank + 1) * share; row += kMultipliers / 32) {
    if (first_narrow + row >= args.narrow_channels) return;
    const int64_t to = ((first_narrow + row) * args.wide_channels + first_wide) * kTaps;
    float sums[Shape::kColumns / 32] = {};
    for (int peer = 0; peer < args.plan.splits; ++peer) {
#pragma unroll
      for (int i = 0; i < Shape::kColumns / 32; ++i) {
        const int place = i * 32 + lane;
        const float* from = tile + row * Shape::kStride + place % kTaps * Shape::kTapStride + place / kTaps;
        sums[i] += args.plan.splits == 1 ? *from : load_peer_word(ptx::shared_address(from), peer);
      }
    }
#pragma unroll
    for (int i = 0; i < Shape::kColumns / 32; ++i) {
      const int place = i * 32 + lane;
      if (place >= left) continue;
      if (args.float_gradient)
        static_cast<float*>(args.gradient)[to + place] = sums[i];
      else
        static_cast<T*>(args.gradient)[to + place] = narrow<T>(sums[i]);
    }
  }
}

// Rows of a stage that no copy ever writes would still be multiplied: they are zero.
template <class Shape>
__device__ void clear_unused_rows(uint8_t* ring, int used) {
  if (used == kChunk) return;
  for (int i = threadIdx.x; i < Shape::kStages * static_cast<int>(Shape::kStageBytes) / 16; i += kThreads)
    reinterpret_cast<uint4*>(ring)[i] = make_uint4(0, 0, 0, 0);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <class T, int kTaps, int kAtoms>
__global__ void __launch_bounds__(kThreads, 1)
    gradient_kernel(const __grid_constant__ CUtensorMap narrow_map, const __grid_constant__ CUtensorMap wide_map,
                    const __grid_constant__ GradientArgs args) {
  using Shape = GradientShape<kTaps, kAtoms>;
  extern __shared__ uint8_t shared[];
  __shared__ Barriers<Shape::kStages> barriers;
  uint8_t* memory = shared + (kAlignment - ptx::shared_address(shared) % kAlignment) % kAlignment;
  const uint32_t ring = ptx::shared_address(memory);
  const GradientPlan& plan = args.plan;
  const int rank = blockIdx.x % plan.splits;
  const int first_wide = static_cast<int>(blockIdx.x / plan.splits % plan.wide_tiles) * Shape::kWide;
  const int first_narrow = static_cast<int>(blockIdx.x / plan.splits / plan.wide_tiles) * kTileRows;
  const int2 steps = share(static_cast<int>(plan.rows.count), rank, plan.splits);
  clear_unused_rows<Shape>(memory, plan.rows.time * plan.rows.samples);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  const bool alone = plan.splits == 1;
  if (threadIdx.x >= kMultipliers) {
    if (threadIdx.x == kMultipliers)
      copy_rows<Shape, kTaps, kAtoms>(&narrow_map, &wide_map, args, first_narrow, first_wide, ring, barriers, steps);
    __syncwarp();
    if (!alone) cluster_sync(), cluster_sync();
  } else {
    float* tile = reinterpret_cast<float*>(memory);
    multiply_rows<T, Shape>(ring, barriers, steps.y - steps.x, tile);
    alone ? ptx::sync_threads(1, kMultipliers) : cluster_sync();
    finish_channels<T, Shape, kTaps>(args, rank, first_narrow, first_wide, tile);
    if (!alone) cluster_sync();  // nobody leaves while a peer still reads its tile
  }
}

template <class T, int kTaps, int kAtoms>
cudaError_t launch_gradient(const CUtensorMap& narrow_map, const CUtensorMap& wide_map, const GradientArgs& args,
                            cudaStream_t stream) {
  const GradientPlan& plan = args.plan;
  return launch_cluster(gradient_kernel<T, kTaps, kAtoms>, plan.narrow_tiles * plan.wide_tiles * plan.splits,
                        plan.splits, GradientShape<kTaps, kAtoms>::kBytes, stream, narrow_map, wide_map, args);
}

}  // namespace

cudaError_t weight_gradient(const Conv1d& conv, const void* narrow, const void* wide, void* gradient,
                            DType gradient_dtype, cudaStream_t stream) {
  const GradientPlan plan = plan_gradient(conv, multiprocessors());
  const RowTiles& rows = plan.rows;
  CUtensorMap narrow_map, wide_map;
  const Boxes narrow_boxes{
      conv.dtype, narrow, conv.batch, conv.narrow_length, padded(conv.narrow_channels), rows.samples, rows.time, 64, 1};
  const Boxes wide_boxes{conv.dtype,   wide,      conv.batch, conv.wide_length, padded(conv.wide_channels),
                         rows.samples, rows.time, 32,         conv.stride};
  if (const auto error = make_map(narrow_boxes, &narrow_map)) return error;
  if (const auto error = make_map(wide_boxes, &wide_map)) return error;
  const GradientArgs args{plan,        conv.narrow_channels, conv.wide_channels,
                          conv.stride, conv.padding,         gradient_dtype == DType::kFloat32,
                          gradient};
  return dispatch_half(conv.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    switch (conv.taps) {
      case 1: return launch_gradient<T, 1, 4>(narrow_map, wide_map, args, stream);
      case 3: return launch_gradient<T, 3, 2>(narrow_map, wide_map, args, stream);
      case 4: return launch_gradient<T, 4, 1>(narrow_map, wide_map, args, stream);
      case 5: return launch_gradient<T, 5, 1>(narrow_map, wide_map, args, stream);
      default: return cudaErrorInvalidValue;
    }
  });
}

}  // namespace dpa::kernels::conv1d
