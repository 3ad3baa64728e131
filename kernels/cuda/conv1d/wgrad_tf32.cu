// wgrad of float32 (wgrad_tf32.cuh): what a block loads, and the launch.
#include "kernels/cuda/conv1d/wgrad_tf32.cuh"

namespace dpa::kernels::conv1d {
namespace {

template <class Shape>
__device__ __forceinline__ void produce_rows(const CUtensorMap* y_map, const XMaps& x_maps, const WgradArgs& args,
                                             int first_y, int first_x, uint32_t buffer,
                                             Pipeline<Shape::kStages>& pipeline, int2 steps) {
  const RowTiles& rows = args.plan.rows;
  const int x_times = args.stride * (kTimes - 1) + Shape::kTaps;
  const uint32_t bytes = Shape::kXAt + Shape::kAtoms * x_times * Shape::kTimeBytes;
  PipelineState at;
  for (int step = steps.x; step < steps.y; ++step, at.advance(Shape::kStages)) {
    const int sample = step / rows.per_sample * kSamples, time = step % rows.per_sample * kTimes;
    const uint32_t full = acquire(pipeline, at, bytes), stage = buffer + at.stage * Shape::kStageBytes;
#pragma unroll
    for (int i = 0; i < Shape::kAtoms; ++i) {
      const XBox x(x_maps, first_x + i * 32, args.first_channels);
      ptx::tma_load(stage + Shape::kXAt + i * Shape::kXBox, x.map, x.channel, sample, time * args.stride - args.padding,
                    full);
    }
#pragma unroll
    for (int i = 0; i < Shape::kYChannels / 32; ++i)
      ptx::tma_load(stage + i * Shape::kYBox, y_map, first_y + i * 32, sample, time, full);
  }
}

template <class Shape>
__global__ void __launch_bounds__(kConsumerThreads + Shape::kProducerThreads, 1)
    wgrad_tf32_kernel(const __grid_constant__ CUtensorMap y_map, const __grid_constant__ XMaps x_maps,
                      const __grid_constant__ WgradArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it: see `supported`
  __shared__ Tf32Pipeline<Shape::kStages> pipeline;
  const auto block = begin_block<Shape>(y_map, x_maps, args.plan, [&] { pipeline.init(); });
  wgrad_tile<Shape>(args, block, pipeline, [&](uint32_t buffer) {
    produce_rows<Shape>(&y_map, x_maps, args, block.first_y, block.first_x, buffer, pipeline.loads, block.steps);
  });
#endif
}

}  // namespace

cudaError_t wgrad_tf32(const Conv1d& conv_, const void* y, const Rows& x, void* gradient, cudaStream_t stream) {
  Conv1d conv = conv_;
  // With one tap rows are rows, wherever a sample ends: whole steps of them.
  if (const int64_t count = conv.batch * conv.y_length; conv.taps == 1 && count % kTimes == 0)
    conv.batch = count / kTimes, conv.y_length = conv.x_length = kTimes;
  const WgradPlan plan = plan_wgrad(conv, multiprocessors());
  const auto boxes = [&](const void* rows, int64_t length, int64_t channels, int times) {
    return Boxes{conv.dtype, rows,  conv.batch, length,         padded(channels),
                 kSamples,   times, 32,         /*row_step=*/1, /*planes_inside=*/true};
  };
  CUtensorMap y_map;
  XMaps x_maps;
  if (const auto error = make_map(boxes(y, conv.y_length, conv.y_channels, kTimes), &y_map)) return error;
  const int x_times = conv.stride * (kTimes - 1) + conv.taps;
  const auto x_boxes = [&](const void* data, int64_t channels) {
    return boxes(data, conv.x_length, channels, x_times);
  };
  if (const auto error = make_x_maps(conv, x, x_boxes, &x_maps)) return error;
  const WgradArgs args = wgrad_args(conv, plan, x, /*float_gradient=*/true, gradient);
  return dispatch_tile<Tf32Shape>(conv.taps, plan.height, [&](auto shape) {
    return launch_wgrad(shape, wgrad_tf32_kernel<decltype(shape)>, y_map, x_maps, args, stream);
  });
}

}  // namespace dpa::kernels::conv1d
