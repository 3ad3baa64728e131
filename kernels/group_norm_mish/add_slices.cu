// The last stage of the backward: gradients of weight and bias, and the sums of the input's, as sums over slices of the
// samples.
//
// grid   one block for 32 columns of the partials (2 or 3, slices, C), a column being a channel of a gradient
// block  32 columns x 8 rows of threads, 32 rows where there are many slices; row j adds up slices j, j + rows, ...,
//        and the first row adds up the rows, so that the order depends on the sizes alone
//
// A dependent launch: the kernel takes its place while the one that writes the partials still runs.
#include "kernels/group_norm_mish/common.cuh"

namespace dpa::kernels::channels_last {
namespace {

constexpr int kFewRows = 8, kManyRows = 32;

template <class P>
__global__ void __launch_bounds__(kWarpSize* kManyRows) add(GroupNormMishBackward args, int64_t slices) {
  __shared__ float scratch[kManyRows][kWarpSize];
  const int64_t channels = args.forward.shape.channels;
  const int lane = threadIdx.x % kWarpSize, row = threadIdx.x / kWarpSize, rows = blockDim.x / kWarpSize;
  const int64_t column = int64_t{blockIdx.x} * kWarpSize + lane;
  const int64_t gradient = column / channels, channel = column % channels;
  void* const all[] = {args.grad_weight, args.grad_bias, args.grad_input_sums};
  P* to = gradient < 3 ? static_cast<P*>(all[gradient]) : nullptr;
  const float* partials = static_cast<const float*>(args.partials) + gradient * slices * channels + channel;
  wait_for_predecessor();
  float sum = 0;
  if (to) {
#pragma unroll 8
    for (int64_t slice = row; slice < slices; slice += rows) sum += partials[slice * channels];
  }
  scratch[row][lane] = sum;
  __syncthreads();
  if (row != 0 || !to) return;
  for (int other = 1; other < rows; ++other) sum += scratch[other][lane];
  to[channel] = narrow<P>(sum);
}

}  // namespace

cudaError_t add_slices(const GroupNormMishBackward& args, cudaStream_t stream) {
  const auto& in = args.forward;
  return dispatch_types(in, [&](auto, auto parameter) {
    const int64_t count = slices(in.shape, in.plan);
    const int rows = count > 16 * kFewRows ? kManyRows : kFewRows;
    const int64_t columns = (args.grad_input_sums ? 3 : 2) * in.shape.channels;
    return launch_dependent(add<typename decltype(parameter)::type>, grid_for(columns, kWarpSize), kWarpSize * rows,
                            stream, args, count);
  });
}

}  // namespace dpa::kernels::channels_last
