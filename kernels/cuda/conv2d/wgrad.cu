// gradient[i, j, r, s] = sum over n, p, q of y[n, p, q, i] x[n, stride p + r - padding, stride q + s - padding, j]
//
// The tile and its steps are those of conv1d/wgrad_tf32.cuh: for a row of the filter, r, that is the gradient of a
// convolution in one dimension, the images' width, whose samples are rows of images. A step has four pixels of a row of
// eight images. A tile's rows are (r, i), 128 of them: of 64 channels i, two rows of the filter, which meet the same x
// in neighbouring rows of y. TMA gives zeros beyond an edge.
//
// grid   x: tiles; y: parts of the steps, each of which leaves its sums in the workspace, (part, r, i, j, s). A second
//        kernel adds them up
// block  wgrad_tf32.cuh
#include "kernels/cuda/conv1d/wgrad_tf32.cuh"
#include "kernels/cuda/conv2d/sample_map.h"
#include "kernels/cuda/conv2d/wgrad.h"

namespace dpa::kernels::conv2d {
namespace {

using Shape = conv1d::Tf32Shape<kWgradTaps, 2, 1>;
using conv1d::kSamples, conv1d::kTimes;

constexpr int kAddThreads = 256, kAddGroups = kAddThreads / 32, kAddElements = 128;

struct ImageWgradArgs {
  conv1d::WgradArgs tiles;
  int y_channels, wide, high, steps;
};
struct Strides {
  int64_t of[4];
};

__device__ __forceinline__ void produce_images(const CUtensorMap* y_map, const CUtensorMap* x_map,
                                               const ImageWgradArgs& args, const conv1d::WgradBlock& block,
                                               uint32_t buffer, conv1d::Pipeline<Shape::kStages>& pipeline) {
  const int stride = args.tiles.stride, padding = args.tiles.padding, first_row = block.first_y / args.y_channels;
  const uint32_t bytes = Shape::kXAt + Shape::kAtoms * (stride * (kTimes - 1) + kWgradTaps) * Shape::kTimeBytes;
  PipelineState at;
  for (int step = block.steps.x; step < block.steps.y; ++step, at.advance(Shape::kStages)) {
    const int column = step % args.wide * kTimes, rest = step / args.wide;
    const int row = rest % args.high, sample = rest / args.high * kSamples;
    const uint32_t full = acquire(pipeline, at, bytes), stage = buffer + at.stage * Shape::kStageBytes;
#pragma unroll
    for (int i = 0; i < Shape::kAtoms; ++i)
      ptx::tma_load(stage + Shape::kXAt + i * Shape::kXBox, x_map, block.first_x + i * 32, sample,
                    column * stride - padding, row * stride + first_row - padding, full);
#pragma unroll
    for (int i = 0; i < Shape::kYChannels / 32; ++i) {
      const int channel = block.first_y + i * 32, filter_row = channel / args.y_channels;
      ptx::tma_load(stage + i * Shape::kYBox, y_map, channel - filter_row * args.y_channels, sample, column,
                    row - (filter_row - first_row), full);
    }
  }
}

__global__ void __launch_bounds__(conv1d::kConsumerThreads + Shape::kProducerThreads, 1)
    image_wgrad_kernel(const __grid_constant__ CUtensorMap y_map, const __grid_constant__ conv1d::XMaps x_maps,
                       const __grid_constant__ ImageWgradArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it
  __shared__ conv1d::Tf32Pipeline<Shape::kStages> pipeline;
  auto block = conv1d::begin_block<Shape>(y_map, x_maps, args.tiles.plan, [&] { pipeline.init(); });
  block.steps = conv1d::share(args.steps, blockIdx.y, gridDim.y);
  conv1d::WgradArgs tiles = args.tiles;
  tiles.gradient = static_cast<float*>(tiles.gradient) + blockIdx.y * tiles.y_channels * tiles.x_channels * kWgradTaps;
  conv1d::wgrad_tile<Shape>(tiles, block, pipeline, [&](uint32_t buffer) {
    produce_images(&y_map, &x_maps.first, args, block, buffer, pipeline.loads);
  });
#endif
}

/// A block: 128 neighbours among the sums. A thread: four of them, of every eighth part.
__global__ void __launch_bounds__(kAddThreads) add_up(const float* partials, int parts, int y_channels, int x_channels,
                                                      const __grid_constant__ Strides strides, float* gradient) {
  __shared__ float4 sums[kAddGroups][32];
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32, at = blockIdx.x * kAddElements;
  const int64_t all = int64_t{kWgradTaps} * y_channels * x_channels * kWgradTaps;
  grid_dependency_sync();
  const float4* const from = reinterpret_cast<const float4*>(partials + at) + lane;
  float4 sum = {};
#pragma unroll 4
  for (int part = group; part < parts; part += kAddGroups) {
    const float4 x = from[part * (all / 4)];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (threadIdx.x >= kAddElements) return;
  float total = 0;
#pragma unroll
  for (const auto& each : sums) total += reinterpret_cast<const float*>(each)[threadIdx.x];
  const int i = at + threadIdx.x, s = i % kWgradTaps, j = i / kWgradTaps % x_channels;
  const int row = i / kWgradTaps / x_channels, channel = row % y_channels, r = row / y_channels;
  gradient[channel * strides.of[0] + j * strides.of[1] + r * strides.of[2] + s * strides.of[3]] = total;
}

}  // namespace

bool takes_image_wgrad(const ImageWgrad& conv) {
  if (!serves(conv) || !runs_hopper_code()) return false;
  const auto tiles = image_wgrad_plan(conv, multiprocessors()).tiles;
  return tiles.y_tiles * tiles.x_tiles <= kMostWgradTiles;
}

int64_t image_wgrad_workspace(const ImageWgrad& conv) {
  const int64_t elements = kWgradTaps * kWgradTaps * conv.y_channels * conv.x_channels;
  return image_wgrad_plan(conv, multiprocessors()).parts * elements * 4;
}

cudaError_t image_wgrad(const ImageWgrad& conv, const float* x, const float* y, float* workspace, float* gradient,
                        const int64_t (&strides)[4], cudaStream_t stream) {
  const ImageWgradPlan plan = image_wgrad_plan(conv, multiprocessors());
  CUtensorMap y_map;
  conv1d::XMaps x_maps;
  const int x_times = conv.stride * (kTimes - 1) + kWgradTaps;
  if (const auto error = make_sample_map(y, conv.batch, conv.y_height, conv.y_width, conv.y_channels, kTimes, &y_map))
    return error;
  if (const auto error =
          make_sample_map(x, conv.batch, conv.x_height, conv.x_width, conv.x_channels, x_times, &x_maps.first))
    return error;
  x_maps.more = x_maps.first;
  ImageWgradArgs args{};
  args.tiles = {plan.tiles,   kWgradTaps * conv.y_channels, conv.x_channels, INT_MAX, conv.stride,
                conv.padding, /*float_gradient=*/true,      workspace};
  args.y_channels = static_cast<int>(conv.y_channels), args.wide = plan.wide, args.high = plan.high;
  args.steps = static_cast<int>(plan.steps);
  const dim3 blocks(static_cast<unsigned>(plan.tiles.y_tiles * plan.tiles.x_tiles), static_cast<unsigned>(plan.parts));
  const unsigned threads = conv1d::kConsumerThreads + Shape::kProducerThreads;
  if (const auto error = LaunchConfig(blocks, threads, stream, Shape::kBytes)
                             .dependent(reinterpret_cast<const void*>(image_wgrad_kernel))
                             .launch(image_wgrad_kernel, y_map, x_maps, args))
    return error;
  const int64_t all = kWgradTaps * kWgradTaps * conv.y_channels * conv.x_channels;
  Strides to;
  for (int i = 0; i < 4; ++i) to.of[i] = strides[i];
  return launch_dependent(add_up, dim3(static_cast<unsigned>(all / kAddElements)), kAddThreads, stream,
                          static_cast<const float*>(workspace), plan.parts, args.y_channels,
                          static_cast<int>(conv.x_channels), to, gradient);
}

}  // namespace dpa::kernels::conv2d
