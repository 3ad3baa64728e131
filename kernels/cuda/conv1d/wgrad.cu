// wgrad: gradient[i, j, k] = sum over b, t of y[b, t, i] x[b, stride t + k - padding, j]
//
// A tile is kHeight * 128 channels i by kXChannels channels j by all taps k: the taps are columns of one GEMM, so that
// a row of the tile is one contiguous piece of the gradient. A step contracts up to 64 rows (b, t): TMA loads the rows
// of y once and the rows of x once a tap, each shifted by it. Rows of both operands run along M and N.
//
// cluster   one tile; split-K: its blocks take consecutive shares of the rows and each stores an equal share of
//           channels i
// block     a producer warp issues loads, two consumer warpgroups multiply kHeight times 64 channels i x all columns
//           each
// epilogue  wgrad.cuh
//
// wgrad_tf32.cu has the same for float32, wgrad_stream.cu for many tiles.
#include "kernels/cuda/conv1d/mma.h"
#include "kernels/cuda/conv1d/tensor_map.h"
#include "kernels/cuda/conv1d/wgrad.cuh"
#include "kernels/plans/conv1d/mma_plan.h"

namespace dpa::kernels::conv1d {
namespace {

// Boxes of x are 32 channels across; kAtoms of them make a tap's share of the columns.
template <int kTaps_, int kAtoms_, int kHeight_>
struct WgradShape {
  static constexpr int kTaps = kTaps_, kAtoms = kAtoms_, kHeight = kHeight_;
  static constexpr int kXChannels = kAtoms * 32;
  static constexpr int kColumns = kTaps * kXChannels;
  static constexpr int kYChannels = kHeight * kTileRows;
  static constexpr uint32_t kYBox = kChunk * 128, kXBox = kChunk * 64;
  static constexpr uint32_t kXAt = 2 * kHeight * kYBox;
  static constexpr uint32_t kStageBytes = kXAt + kTaps * kAtoms * kXBox;
  // Of one tap there are many tiles with few steps: two blocks of the low tile share a multiprocessor, so that one
  // multiplies while the other stores.
  static constexpr int kBlocks = kTaps == 1 && kHeight == 1 ? 2 : 1;
  static constexpr int kStages = 208 * 1024 / kBlocks / kStageBytes;
  static constexpr int kBytes = kStages * kStageBytes + kAlignment;
  static constexpr int kSums = kColumns / 2;  // of a thread in 64 channels i
  // A channel's piece is padded by 8 words, so that a warp's rows start at different banks.
  static constexpr int kRow = kColumns + 8;
  // The high tile's sums need registers that the producer's threads give away, which only a whole warpgroup can.
  static constexpr int kProducerThreads = kHeight == 2 ? 128 : 32;
  static_assert(kYChannels * kRow * 4 <= kStages * kStageBytes, "the tile of sums replaces the stages");
};

template <class Shape>
__device__ void produce_rows(const CUtensorMap* y_map, const XMaps& x_maps, const WgradArgs& args, int first_y,
                             int first_x, uint32_t buffer, Pipeline<Shape::kStages>& pipeline, int2 steps) {
  const RowTiles& rows = args.plan.rows;
  const uint32_t bytes = rows.time * rows.samples * (2 * Shape::kHeight * 128 + Shape::kTaps * Shape::kAtoms * 64);
  PipelineState at;
  for (int step = steps.x; step < steps.y; ++step, at.advance(Shape::kStages)) {
    const int sample = step / rows.per_sample * rows.samples, time = step % rows.per_sample * rows.time;
    const uint32_t full = acquire(pipeline, at, bytes), stage = buffer + at.stage * Shape::kStageBytes;
#pragma unroll
    for (int i = 0; i < 2 * Shape::kHeight; ++i)
      ptx::tma_load(stage + i * Shape::kYBox, y_map, first_y + i * 64, time, sample, full);
#pragma unroll
    for (int i = 0; i < Shape::kAtoms; ++i) {
      const XBox x(x_maps, first_x + i * 32, args.first_channels);
#pragma unroll
      for (int k = 0; k < Shape::kTaps; ++k)
        ptx::tma_load(stage + Shape::kXAt + (k * Shape::kAtoms + i) * Shape::kXBox, x.map, x.channel,
                      time * args.stride + k - args.padding, sample, full);
    }
  }
}

template <class T, class Shape>
__device__ __forceinline__ void consume_rows(uint32_t buffer, Pipeline<Shape::kStages>& pipeline, int steps,
                                             float* tile) {
  const int group = threadIdx.x / 128;
  float sums[Shape::kHeight][Shape::kSums];
  consume(pipeline, steps, [&](int stage, bool first) {
    const uint32_t y = buffer + stage * Shape::kStageBytes;
    const uint64_t b = wgmma::swizzled(y + Shape::kXAt, Shape::kXBox, 512, wgmma::Swizzle::k64);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
#pragma unroll
      for (int m = 0; m < Shape::kHeight; ++m) {
        const uint32_t rows = y + (group * Shape::kHeight + m) * Shape::kYBox;
        const uint64_t a = wgmma::swizzled(rows, Shape::kYBox, 1024, wgmma::Swizzle::k128);
        wgmma::mma_ss<T, Shape::kColumns, 1, 1>(sums[m], a + k * 128, b + k * 64, !(first && k == 0));
      }
    }
  });
  ptx::sync_threads(1, kConsumerThreads);  // the tile takes the place of what the other warpgroup still read
  store_tile<Shape>(tile, sums);
}

// Rows of a stage that no copy ever writes would still be multiplied: they are zero.
template <class Shape>
__device__ void clear_unused_rows(uint8_t* buffer, int used) {
  if (used == kChunk) return;
  for (int i = threadIdx.x; i < Shape::kStages * static_cast<int>(Shape::kStageBytes) / 16; i += kThreads)
    reinterpret_cast<uint4*>(buffer)[i] = make_uint4(0, 0, 0, 0);
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
}

template <class T, class Shape>
__global__ void __launch_bounds__(kConsumerThreads + Shape::kProducerThreads, Shape::kBlocks)
    wgrad_kernel(const __grid_constant__ CUtensorMap y_map, const __grid_constant__ XMaps x_maps,
                 const __grid_constant__ WgradArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it: see `supported`
  __shared__ Pipeline<Shape::kStages> pipeline;
  const WgradPlan& plan = args.plan;
  const auto block = begin_block<Shape>(y_map, x_maps, plan, [&] { pipeline.init(); });
  clear_unused_rows<Shape>(block.memory, plan.rows.time * plan.rows.samples);
  __syncthreads();
  grid_dependency_sync();
  const uint32_t buffer = ptx::shared_address(block.memory);
  if (threadIdx.x >= kConsumerThreads) {
    if constexpr (Shape::kHeight == 2) ptx::registers_decrease<40>();
    if (threadIdx.x == kConsumerThreads)
      produce_rows<Shape>(&y_map, x_maps, args, block.first_y, block.first_x, buffer, pipeline, block.steps);
    follow_epilogue(plan);
  } else {
    if constexpr (Shape::kHeight == 2) ptx::registers_increase<232>();
    float* const tile = reinterpret_cast<float*>(block.memory);
    consume_rows<T, Shape>(buffer, pipeline, block.steps.y - block.steps.x, tile);
    store_gradient<T, Shape>(args, block.first_y, block.first_x, block.rank, tile);
  }
#endif
}

}  // namespace

// dgrad writes two tensors of one width; a box of x, for wgrad by wgmma, is of 32 channels of one tensor.
bool backward_takes_two(int64_t first, int64_t more) { return first == more && first % (has_wgmma() ? 32 : 8) == 0; }

int64_t wgrad_workspace(const Conv1d& conv) {
  if (by_wgmma(conv) && wgmma_takes_taps(conv)) return 0;
  const auto plan = plan_mma_wgrad(conv, multiprocessors());
  return plan.splits == 1 ? 0 : conv.y_channels * conv.x_channels * conv.taps * plan.splits * int64_t{sizeof(float)};
}

cudaError_t wgrad(const Conv1d& conv, const void* y, const Rows& x, void* gradient, DType gradient_dtype,
                  void* workspace, cudaStream_t stream) {
  if (!by_wgmma(conv) || !wgmma_takes_taps(conv))
    return mma_wgrad(conv, y, x, gradient, gradient_dtype, workspace, stream);
  if (x.more && conv.first_channels % 32 != 0) return cudaErrorInvalidValue;
  if (conv.dtype == DType::kFloat32) return wgrad_tf32(conv, y, x, gradient, stream);
  if (gradient_dtype == DType::kFloat32 && streams(conv, multiprocessors()))
    return wgrad_stream(conv, y, x, static_cast<float*>(gradient), stream);
  const WgradPlan plan = plan_wgrad(conv, multiprocessors());
  const RowTiles& rows = plan.rows;
  CUtensorMap y_map;
  XMaps x_maps;
  const Boxes y_boxes{conv.dtype,
                      y,
                      conv.batch,
                      conv.y_length,
                      padded(conv.y_channels),
                      rows.samples,
                      rows.time,
                      /*box_columns=*/64,
                      /*row_step=*/1,
                      /*planes_inside=*/false};
  const auto x_boxes = [&](const void* data, int64_t channels) {
    return Boxes{conv.dtype,   data,      conv.batch, conv.x_length, padded(channels),
                 rows.samples, rows.time, 32,         conv.stride};
  };
  if (const auto error = make_map(y_boxes, &y_map)) return error;
  if (const auto error = make_x_maps(conv, x, x_boxes, &x_maps)) return error;
  const WgradArgs args = wgrad_args(conv, plan, x, gradient_dtype == DType::kFloat32, gradient);
  return dispatch_half(conv.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return dispatch_tile<WgradShape>(conv.taps, plan.height, [&](auto shape) {
      return launch_wgrad(shape, wgrad_kernel<T, decltype(shape)>, y_map, x_maps, args, stream);
    });
  });
}

}  // namespace dpa::kernels::conv1d
