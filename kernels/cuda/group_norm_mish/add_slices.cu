// The last stage of backwards: gradients of weight and bias, and the sums of the input's, as sums over slices of the
// samples. Those of several normalisations with as many channels and slices in one launch.
//
// grid   one block for 32 columns of the partials (gradients, slices, C), a column being a channel of a gradient
// block  32 columns x 8 rows of threads, 32 rows where there are many slices; row j adds up slices j, j + rows, ...,
//        and the first row adds up the rows, so that the order depends on the sizes alone
//
// A dependent launch: the kernel takes its place while the one that writes the partials still runs.
#include "kernels/cuda/group_norm_mish/common.cuh"

namespace dpa::kernels::channels_last {
namespace {

constexpr int kFewRows = 8, kManyRows = 32;

template <class P>
__global__ void __launch_bounds__(kWarpSize* kManyRows) add(const __grid_constant__ SliceSums args) {
  __shared__ float scratch[kManyRows][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, row = threadIdx.x / kWarpSize, rows = blockDim.x / kWarpSize;
  const int64_t column = int64_t{blockIdx.x} * kWarpSize + lane;
  const int64_t gradient = column / args.channels, channel = column % args.channels;
  P* const to = gradient < args.gradients ? static_cast<P*>(args.sums[gradient]) : nullptr;
  const float* partials = args.partials + gradient * args.slices * args.channels + channel;
  grid_dependency_sync();
  float sum = 0;
  if (to) {
#pragma unroll 8
    for (int64_t slice = row; slice < args.slices; slice += rows) sum += partials[slice * args.channels];
  }
  scratch[row][lane] = sum;
  __syncthreads();
  if (row != 0 || !to) return;
  for (int other = 1; other < rows; ++other) sum += scratch[other][lane];
  to[channel] = narrow<P>(sum);
}

}  // namespace

cudaError_t add_slices(const SliceSums& args, cudaStream_t stream) {
  return dispatch_to_32_bits(args.dtype, [&](auto tag) {
    const int rows = args.slices > 16 * kFewRows ? kManyRows : kFewRows;
    return launch_dependent(add<typename decltype(tag)::type>, grid_for(args.gradients * args.channels, kWarpSize),
                            kWarpSize * rows, stream, args);
  });
}

}  // namespace dpa::kernels::channels_last
