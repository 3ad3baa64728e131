// wgrad by warp-level MMAs (`mma.sync`), for compute capability 8.0 and later: any number of taps up to 9.
//
// Where tiles do not fill the device, several blocks share the rows of a tile; each stores its sums in a workspace,
// and `add_partials` adds them in the blocks' order. mma_wgrad.cuh has the block's work.
#include "kernels/cuda/conv1d/launch.cuh"
#include "kernels/cuda/conv1d/mma.h"
#include "kernels/cuda/conv1d/mma_wgrad.cuh"

namespace dpa::kernels::conv1d {
namespace {

template <class T, int kSlots, bool kInFull>
__global__ void __launch_bounds__(kMmaThreads, kSlots <= 5 && !kInFull ? 2 : 1)
    mma_wgrad_kernel(const __grid_constant__ MmaWgradArgs args) {
#if __CUDA_ARCH__ >= 800  // elsewhere nobody launches it: see `supported`
  grid_dependency_sync();
  wgrad_block<T, kSlots, kInFull>(args, wgrad_tile(args, blockIdx.x));
#endif
}

// A thread an element of the gradient at a time.
template <class G>
__global__ void add_partials(const float* partials, int splits, int64_t count, G* gradient) {
  grid_dependency_sync();
  for (int64_t e = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; e < count; e += int64_t{gridDim.x} * blockDim.x) {
    float sum = 0;
#pragma unroll 4
    for (int s = 0; s < splits; ++s) sum += partials[s * count + e];
    gradient[e] = narrow<G>(sum);
  }
}

}  // namespace

cudaError_t mma_wgrad(const Conv1d& conv, const void* y, const Rows& x, void* gradient, DType gradient_dtype,
                      void* workspace, cudaStream_t stream) {
  const auto plan = plan_mma_wgrad(conv, multiprocessors());
  if (plan.splits > 1 && !workspace) return cudaErrorInvalidValue;
  auto* const partials = plan.splits > 1 ? static_cast<float*>(workspace) : nullptr;
  const bool floats = gradient_dtype == DType::kFloat32;
  MmaWgradArgs args{};
  args.plan = plan, args.y = y, args.x = x.rows, args.more = x.more, args.gradient = gradient, args.partials = partials;
  args.float_gradient = floats;
  args.y_rows = static_cast<int>(conv.batch * conv.y_length), args.y_length = static_cast<int>(conv.y_length);
  args.x_rows = static_cast<int>(conv.batch * conv.x_length), args.x_length = static_cast<int>(conv.x_length);
  args.y_channels = static_cast<int>(conv.y_channels), args.y_width = padded(conv.y_channels);
  const int64_t first = x.more ? conv.first_channels : conv.x_channels;
  args.x_channels = static_cast<int>(conv.x_channels), args.first_channels = static_cast<int>(first);
  args.x_width = padded(first), args.more_width = padded(conv.x_channels - first);
  args.taps = conv.taps, args.stride = conv.stride, args.padding = conv.padding;
  const Launch launch{plan.y_tiles * plan.x_tiles * plan.splits, kMmaThreads, /*cluster=*/0,
                      mma_wgrad_bytes(conv, plan), stream};
  return dispatch_to_32_bits(conv.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto error = dispatch_value<4, 5, 6, 7, 8, 9>(args.plan.slots, [&](auto slots) {
      if constexpr (kIsFloat<T>)
        if (in_full(conv)) return launch_cluster(mma_wgrad_kernel<T, slots.value, /*kInFull=*/true>, launch, args);
      return launch_cluster(mma_wgrad_kernel<T, slots.value, /*kInFull=*/false>, launch, args);
    });
    if (error != cudaSuccess) return error;
    if (!partials) return cudaSuccess;
    const int64_t count = conv.y_channels * conv.x_channels * conv.taps;
    constexpr int kThreads = 256;
    const auto blocks = grid_for(count, kThreads);
    const auto* const sums = partials;
    return floats ? launch_dependent(add_partials<float>, blocks, kThreads, stream, sums, plan.splits, count,
                                     static_cast<float*>(gradient))
                  : launch_dependent(add_partials<T>, blocks, kThreads, stream, sums, plan.splits, count,
                                     static_cast<T*>(gradient));
  });
}

}  // namespace dpa::kernels::conv1d
