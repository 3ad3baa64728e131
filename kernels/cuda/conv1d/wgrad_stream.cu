// wgrad of many tiles with short sums, in 16 bits: what wgrad.cu computes, by blocks that work on tile after tile.
//
// A gradient of 1024 x 1024 x 5 has 21 MB; at batch 128 a multiprocessor multiplies for 6 us and stores for as long. So
// the sums of a tile have a place of their own in shared memory, from which bulk copies store them while the next tile is
// multiplied.
//
// A step contracts up to 64 rows (time, sample), times outside. The rows of x that a tap meets begin `samples` rows
// after those of the tap before it, so one box of x serves all taps: in the matrix of x, whose columns are the taps'
// channels side by side, `samples` rows are the distance from one tap's columns to the next one's.
//
// block   a producer warp issues loads, two consumer warpgroups multiply 64 channels i x 32 channels j x all taps
//         each; a warp stores its own 16 channels i
// grid    at most a block a multiprocessor; each takes every gridDim-th tile
#include "kernels/cuda/conv1d/tensor_map.h"
#include "kernels/cuda/conv1d/wgrad.cuh"

namespace dpa::kernels::conv1d {
template <int kTaps_>
struct StreamShape {
  static constexpr int kTaps = kTaps_, kHeight = 1, kXChannels = 32, kColumns = kTaps * kXChannels;
  static constexpr int kYChannels = kTileRows;
  static constexpr uint32_t kYBox = kChunk * 128, kXBox = (kChunk + (kTaps - 1) * kStreamSamples) * 64;
  static constexpr uint32_t kXAt = 2 * kYBox, kStageBytes = kXAt + kXBox;
  static constexpr int kRow = kColumns + 8, kSums = kColumns / 2;
  static constexpr int kStages = (226 * 1024 - kYChannels * kRow * 4) / kStageBytes;
  static constexpr uint32_t kTileAt = kStages * kStageBytes, kBytes = kTileAt + kYChannels * kRow * 4 + kAlignment;
};

namespace {

template <class T, class Shape>
__global__ void __launch_bounds__(kThreads, 1)
    wgrad_stream_kernel(const __grid_constant__ CUtensorMap y_map, const __grid_constant__ XMaps x_maps,
                        const __grid_constant__ WgradArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ Pipeline<Shape::kStages> pipeline;
  extern __shared__ uint8_t shared[];
  uint8_t* const memory = shared + (kAlignment - ptx::shared_address(shared) % kAlignment) % kAlignment;
  const WgradPlan& plan = args.plan;
  const RowTiles& rows = plan.rows;
  const uint32_t buffer = ptx::shared_address(memory), used = rows.time * rows.samples;
  const int tiles = static_cast<int>(plan.y_tiles * plan.x_tiles), x_tiles = static_cast<int>(plan.x_tiles);
  const int steps = static_cast<int>(rows.count);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&y_map);
    ptx::prefetch_tensor_map(&x_maps.first);
    pipeline.init();
  }
  // Rows that no copy writes are multiplied with zeros, and must be numbers.
  for (int i = threadIdx.x; i < static_cast<int>(Shape::kTileAt) / 16; i += kThreads)
    reinterpret_cast<uint4*>(memory)[i] = make_uint4(0, 0, 0, 0);
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
  __syncthreads();
  grid_dependency_sync();
  if (threadIdx.x >= kConsumerThreads) {
    if (threadIdx.x != kConsumerThreads) return;
    PipelineState at;
    const uint32_t bytes = used * 2 * 128 + (rows.time + Shape::kTaps - 1) * rows.samples * 64;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const int first_y = tile / x_tiles * Shape::kYChannels;
      const XBox x(x_maps, tile % x_tiles * Shape::kXChannels, args.first_channels);
      for (int step = 0; step < steps; ++step, at.advance(Shape::kStages)) {
        const int sample = step / rows.per_sample * rows.samples, time = step % rows.per_sample * rows.time;
        const uint32_t full = acquire(pipeline, at, bytes), stage = buffer + at.stage * Shape::kStageBytes;
        ptx::tma_load(stage, &y_map, first_y, sample, time, full);
        ptx::tma_load(stage + Shape::kYBox, &y_map, first_y + 64, sample, time, full);
        ptx::tma_load(stage + Shape::kXAt, x.map, x.channel, sample, time - args.padding, full);
      }
    }
    return;
  }
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* const tile_sums = reinterpret_cast<float*>(memory + Shape::kTileAt);
  PipelineState at;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int first_y = tile / x_tiles * Shape::kYChannels, first_x = tile % x_tiles * Shape::kXChannels;
    float sums[1][Shape::kSums];
    int before = -1;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      ptx::barrier_wait(full_barrier(pipeline, at), at.phase);
      const uint32_t y = buffer + at.stage * Shape::kStageBytes;
      const uint64_t a = wgmma::swizzled(y + group * Shape::kYBox, Shape::kYBox, 1024, wgmma::Swizzle::k128);
      const uint64_t b = wgmma::swizzled(y + Shape::kXAt, rows.samples * 64, 512, wgmma::Swizzle::k64);
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k)
        wgmma::mma_ss<T, Shape::kColumns, 1, 1>(sums[0], a + k * 128, b + k * 64, !(step == 0 && k == 0));
      wgmma::commit();
      if (before >= 0) {
        wgmma::wait<1>();
        release(pipeline, before);
      }
      before = at.stage;
      at.advance(Shape::kStages);
    }
    wgmma::wait<0>();
    release(pipeline, before);
    cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<0>{});
    __syncwarp();
    store_tile<Shape>(tile_sums, sums);
    cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    __syncwarp();
    const int channel = warp * 16 + lane;
    if (lane < 16 && first_y + channel < args.y_channels) {
      const int64_t to = ((first_y + channel) * args.x_channels + first_x) * Shape::kTaps;
      const int elements = static_cast<int>(min(args.x_channels - first_x, int64_t{Shape::kXChannels})) * Shape::kTaps;
      cuda::ptx::cp_async_bulk(cuda::ptx::space_global, cuda::ptx::space_shared,
                               static_cast<float*>(args.gradient) + to, tile_sums + channel * Shape::kRow,
                               elements * 4);
      cuda::ptx::cp_async_bulk_commit_group();
    }
  }
  cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<0>{});
#endif
}

}  // namespace

cudaError_t wgrad_stream(const Conv1d& conv, const void* y, const Rows& x, float* gradient, cudaStream_t stream) {
  const StreamPlan plan = plan_stream(conv, multiprocessors());
  const RowTiles& rows = plan.tiles.rows;
  const auto boxes = [&](const void* data, int64_t length, int64_t channels, int times, int columns) {
    return Boxes{conv.dtype,   data,  conv.batch, length,         padded(channels),
                 rows.samples, times, columns,    /*row_step=*/1, /*planes_inside=*/true};
  };
  const auto launch = [&](auto shape) {
    using Shape = decltype(shape);
    CUtensorMap y_map;
    XMaps x_maps;
    if (const auto error = make_map(boxes(y, conv.y_length, conv.y_channels, rows.time, 64), &y_map)) return error;
    const int x_times = rows.time + Shape::kTaps - 1;
    const auto x_boxes = [&](const void* data, int64_t channels) {
      return boxes(data, conv.x_length, channels, x_times, Shape::kXChannels);
    };
    if (const auto error = make_x_maps(conv, x, x_boxes, &x_maps)) return error;
    const WgradArgs args = wgrad_args(conv, plan.tiles, x, /*float_gradient=*/true, gradient);
    return dispatch_half(conv.dtype, [&](auto tag) {
      const Launch launch{plan.blocks, kThreads, /*cluster=*/0, static_cast<int>(Shape::kBytes), stream};
      return launch_cluster(wgrad_stream_kernel<typename decltype(tag)::type, Shape>, launch, y_map, x_maps, args);
    });
  };
  return conv.taps == 5 ? launch(StreamShape<5>{}) : launch(StreamShape<7>{});
}

}  // namespace dpa::kernels::conv1d
