// The last stage of the backward: gradients of weight and bias as sums over slices of the samples.
//
// grid   one block for 32 columns of the partials (2, slices, C), a column being a channel of either gradient
// block  32 x 32 threads; row j adds up slices j, j + 32, ...; then a warp adds up the rows of a column, so that the
//        order depends on the sizes alone
#include "kernels/group_norm_mish/common.cuh"

namespace dpa::kernels::channels_last {
namespace {

constexpr int kRows = 32;

template <class T, class P>
__global__ void __launch_bounds__(kWarpSize* kRows) add(GroupNormMishBackward args, int64_t slices) {
  using A = Accumulate<T>;
  __shared__ A scratch[kRows][kWarpSize + 1];
  const int64_t channels = args.forward.shape.channels;
  const int lane = threadIdx.x % kWarpSize, row = threadIdx.x / kWarpSize;
  for (int64_t first = int64_t{blockIdx.x} * kWarpSize; first < 2 * channels; first += int64_t{gridDim.x} * kWarpSize) {
    const int64_t column = first + lane, channel = column % channels;
    const A* partials = static_cast<const A*>(args.partials) + column / channels * slices * channels + channel;
    A sum = 0;
    for (int64_t slice = row; column < 2 * channels && slice < slices; slice += kRows)
      sum += partials[slice * channels];
    scratch[row][lane] = sum;
    __syncthreads();
    sum = warp_sum(scratch[lane][row]);  // warp `row` adds up column `row`
    const int64_t mine = first + row;
    P* to = static_cast<P*>(mine < channels ? args.grad_weight : args.grad_bias);
    if (lane == 0 && mine < 2 * channels && to) to[mine % channels] = narrow<P>(sum);
    __syncthreads();
  }
}

}  // namespace

cudaError_t add_slices(const GroupNormMishBackward& args, cudaStream_t stream) {
  const auto& in = args.forward;
  return dispatch_types(in, [&](auto tag, auto parameter) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(parameter)::type;
    return launch(add<T, P>, grid_for(2 * in.shape.channels, kWarpSize), kWarpSize * kRows, stream, args,
                  backward_slices(in.shape, in.plan));
  });
}

}  // namespace dpa::kernels::channels_last
