// weight_gradient: gradient[i, j, k] = sum over b, t of narrow[b, t, i] wide[b, stride t + k - padding, j]
//
// A tile is kHeight * 128 channels i by kWide channels j by all taps k: the taps are columns of one product, so that a
// row of the tile is one piece of the gradient's memory. A step contracts up to 64 rows (b, t): the copy engine brings
// the narrow rows once and the wide rows once a tap, each shifted by it. Both operands' rows run along M and N.
//
// cluster  one tile; its blocks take consecutive shares of the rows and each finishes an equal share of the channels i
// block    one warp copies, two warpgroups multiply kHeight times 64 channels i x all columns each
// epilogue sums go to shared memory in the gradient's order. Alone, the copy engine writes them, a channel i at a time;
//          else a warp takes a channel, adds the sums of all the cluster's blocks in rank order and stores them
#include "kernels/cuda/conv1d/conv1d.h"
#include "kernels/cuda/conv1d/launch.cuh"
#include "kernels/cuda/conv1d/tensor_map.h"

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
template <int kTaps_, int kAtoms_, int kHeight_>
struct GradientShape {
  static constexpr int kTaps = kTaps_, kAtoms = kAtoms_, kHeight = kHeight_;
  static constexpr int kWide = kAtoms * 32;
  static constexpr int kColumns = kTaps * kWide;
  static constexpr int kNarrow = kHeight * kTileRows;
  static constexpr uint32_t kNarrowBox = kChunk * 128, kWideBox = kChunk * 64;
  static constexpr uint32_t kWideAt = 2 * kHeight * kNarrowBox;
  static constexpr uint32_t kStageBytes = kWideAt + kTaps * kAtoms * kWideBox;
  static constexpr int kStages = 208 * 1024 / kStageBytes;
  static constexpr int kBytes = kStages * kStageBytes + kAlignment;
  static constexpr int kSums = kColumns / 2;  // of a thread in 64 channels i
  // A channel's piece is padded by 8 words, so that a warp's rows start at different banks.
  static constexpr int kRow = kColumns + 8;
  // The high tile's sums need registers that the copying threads give away, which only a whole warpgroup can.
  static constexpr int kCopiers = kHeight == 2 ? 128 : 32;
  static_assert(kNarrow * kRow * 4 <= kStages * kStageBytes, "the tile of sums takes the ring's place");
};

template <class Shape>
__device__ void copy_rows(const CUtensorMap* narrow_map, const CUtensorMap* wide_map, const GradientArgs& args,
                          int first_narrow, int first_wide, uint32_t ring, Barriers<Shape::kStages>& barriers,
                          int2 steps) {
  const RowTiles& rows = args.plan.rows;
  const uint32_t bytes = rows.time * rows.samples * (2 * Shape::kHeight * 128 + Shape::kTaps * Shape::kAtoms * 64);
  Position<Shape::kStages> at;
  for (int step = steps.x; step < steps.y; ++step, at.advance()) {
    const int sample = step / rows.per_sample * rows.samples, time = step % rows.per_sample * rows.time;
    const uint32_t full = acquire(barriers, at, bytes), stage = ring + at.stage * Shape::kStageBytes;
#pragma unroll
    for (int i = 0; i < 2 * Shape::kHeight; ++i)
      copy_box(stage + i * Shape::kNarrowBox, narrow_map, first_narrow + i * 64, time, sample, full);
#pragma unroll
    for (int k = 0; k < Shape::kTaps; ++k) {
#pragma unroll
      for (int i = 0; i < Shape::kAtoms; ++i)
        copy_box(stage + Shape::kWideAt + (k * Shape::kAtoms + i) * Shape::kWideBox, wide_map, first_wide + i * 32,
                 time * args.stride + k - args.padding, sample, full);
    }
  }
}

// A thread's sums in the tile, rows of kRow words in the gradient's order. The block's warpgroups have left the ring.
template <class Shape>
__device__ __forceinline__ void store_tile(float* tile, const float (&sums)[Shape::kHeight][Shape::kSums]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Shape::kHeight; ++m) {
    float* row = tile + ((warp / 4 * Shape::kHeight + m) * 64 + warp % 4 * 16 + lane / 4) * Shape::kRow;
#pragma unroll
    for (int c = 0; c < Shape::kColumns / 8; ++c) {
      const int tap = 8 * c / Shape::kWide, j = 8 * c % Shape::kWide + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) row[i / 2 * 8 * Shape::kRow + (j + i % 2) * Shape::kTaps + tap] = sums[m][4 * c + i];
    }
  }
}

template <class T, class Shape>
__device__ __forceinline__ void multiply_rows(uint32_t ring, Barriers<Shape::kStages>& barriers, int steps,
                                              float* tile) {
  const int group = threadIdx.x / 128;
  float sums[Shape::kHeight][Shape::kSums];
  consume(barriers, steps, [&](int stage, bool first) {
    const uint32_t narrow = ring + stage * Shape::kStageBytes;
    const uint64_t b = operand(narrow + Shape::kWideAt, Shape::kWideBox, 512, Swizzle::k64);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
#pragma unroll
      for (int m = 0; m < Shape::kHeight; ++m) {
        const uint32_t rows = narrow + (group * Shape::kHeight + m) * Shape::kNarrowBox;
        const uint64_t a = operand(rows, Shape::kNarrowBox, 1024, Swizzle::k128);
        product<T, Shape::kColumns, 1, 1>(sums[m], a + k * 128, b + k * 64, !(first && k == 0));
      }
    }
  });
  ptx::sync_threads(1, kMultipliers);  // the tile takes the place of what the other warpgroup still read
  store_tile<Shape>(tile, sums);
}

// The piece of the gradient that a block's tile is.
struct Piece {
  int64_t begin, step;     // of its first channel, and from channel to channel, in elements
  int channels, elements;  // channels i; elements of each
};

// Alone: the warp's own channels, one a lane.
template <class Shape>
__device__ __forceinline__ void copy_channels(float* gradient, const Piece& piece, const float* tile) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int channel = (warp / 4 * Shape::kHeight + lane / 16) * 64 + warp % 4 * 16 + lane % 16;
  if (lane / 16 < Shape::kHeight && channel < piece.channels)
    copy_out(gradient + piece.begin + channel * piece.step, ptx::shared_address(tile + channel * Shape::kRow),
             piece.elements * 4);
  wait_copied_out();
}

template <class T, class Shape>
__device__ __forceinline__ void add_channels(const GradientArgs& args, const Piece& piece, int rank,
                                             const float* tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, splits = args.plan.splits;
  const int rows = Shape::kNarrow / (kMultipliers / 32) / splits, first = (rank * (kMultipliers / 32) + warp) * rows;
  const bool quads = args.float_gradient && args.wide_channels % 4 == 0;
  for (int row = first; row < min(first + rows, piece.channels); ++row) {
    const uint32_t from = ptx::shared_address(tile + row * Shape::kRow);
    const int64_t to = piece.begin + row * piece.step;
    for (int e = quads ? lane * 4 : lane; e < piece.elements; e += quads ? 128 : 32) {
      float4 sum = {};
#pragma unroll 4
      for (int next = 0; next < splits; ++next) {  // in a ring, so that no two blocks read the same one's at a time
        const uint64_t there = peer_address(from + e * 4, (rank + next) & (splits - 1));
        const float4 v = quads ? load_peer(there, true) : make_float4(load_peer_word(there), 0, 0, 0);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      if (quads)
        *reinterpret_cast<float4*>(static_cast<float*>(args.gradient) + to + e) = sum;
      else if (args.float_gradient)
        static_cast<float*>(args.gradient)[to + e] = sum.x;
      else
        static_cast<T*>(args.gradient)[to + e] = narrow<T>(sum.x);
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

template <class T, class Shape>
__global__ void __launch_bounds__(kMultipliers + Shape::kCopiers, 1)
    gradient_kernel(const __grid_constant__ CUtensorMap narrow_map, const __grid_constant__ CUtensorMap wide_map,
                    const __grid_constant__ GradientArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it: see `supported`
  extern __shared__ uint8_t shared[];
  __shared__ Barriers<Shape::kStages> barriers;
  uint8_t* memory = shared + (kAlignment - ptx::shared_address(shared) % kAlignment) % kAlignment;
  float* tile = reinterpret_cast<float*>(memory);
  const uint32_t ring = ptx::shared_address(memory);
  const GradientPlan& plan = args.plan;
  const unsigned splits = plan.splits, wide_tiles = static_cast<unsigned>(plan.wide_tiles);
  const int rank = blockIdx.x % splits;
  const int first_wide = blockIdx.x / splits % wide_tiles * Shape::kWide;
  const int first_narrow = blockIdx.x / splits / wide_tiles * Shape::kNarrow;
  const int2 steps = share(static_cast<int>(plan.rows.count), rank, plan.splits);
  clear_unused_rows<Shape>(memory, plan.rows.time * plan.rows.samples);
  if (threadIdx.x == 0) {
    prefetch_map(&narrow_map);
    prefetch_map(&wide_map);
    barriers.init();
  }
  __syncthreads();
  wait_for_predecessor();
  if (threadIdx.x >= kMultipliers) {
    if constexpr (Shape::kHeight == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == kMultipliers)
      copy_rows<Shape>(&narrow_map, &wide_map, args, first_narrow, first_wide, ring, barriers, steps);
    __syncwarp();
    if (splits > 1) cluster_sync(), cluster_sync();
  } else {
    if constexpr (Shape::kHeight == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply_rows<T, Shape>(ring, barriers, steps.y - steps.x, tile);
    const Piece piece{(first_narrow * args.wide_channels + first_wide) * Shape::kTaps,
                      args.wide_channels * Shape::kTaps,
                      static_cast<int>(min(args.narrow_channels - first_narrow, int64_t{Shape::kNarrow})),
                      static_cast<int>(min(args.wide_channels - first_wide, int64_t{Shape::kWide})) * Shape::kTaps};
    if (splits == 1 && args.float_gradient && args.wide_channels % 4 == 0) {
      copy_channels<Shape>(static_cast<float*>(args.gradient), piece, tile);
    } else {
      splits == 1 ? ptx::sync_threads(1, kMultipliers) : cluster_sync();
      add_channels<T, Shape>(args, piece, rank, tile);
      if (splits > 1) cluster_sync();  // nobody leaves while a peer still reads its tile
    }
  }
#endif
}

template <class T, int kTaps, int kAtoms>
cudaError_t launch_gradient(const CUtensorMap& narrow_map, const CUtensorMap& wide_map, const GradientArgs& args,
                            cudaStream_t stream) {
  const GradientPlan& plan = args.plan;
  const int64_t blocks = plan.narrow_tiles * plan.wide_tiles * plan.splits;
  const auto go = [&](auto shape) {
    using Shape = decltype(shape);
    const Launch launch{blocks, kMultipliers + Shape::kCopiers, plan.splits, Shape::kBytes, stream};
    return launch_cluster(gradient_kernel<T, Shape>, launch, narrow_map, wide_map, args);
  };
  if constexpr (kTaps != 3)
    if (plan.height == 2) return go(GradientShape<kTaps, kAtoms, 2>{});
  return go(GradientShape<kTaps, kAtoms, 1>{});
}

}  // namespace

cudaError_t weight_gradient(const Conv1d& conv, const void* narrow, const void* wide, void* gradient,
                            DType gradient_dtype, cudaStream_t stream, int64_t narrow_pitch) {
  const GradientPlan plan = plan_gradient(conv, multiprocessors());
  const RowTiles& rows = plan.rows;
  CUtensorMap narrow_map, wide_map;
  const Boxes narrow_boxes{conv.dtype,
                           narrow,
                           conv.batch,
                           conv.narrow_length,
                           padded(conv.narrow_channels),
                           rows.samples,
                           rows.time,
                           /*box_columns=*/64,
                           /*row_step=*/1,
                           /*planes_inside=*/false,
                           narrow_pitch};
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
