// The convolutions of weights as they lie in the parameter (in_place.cuh): the kernel of convolution_kernel.cuh.
#include "kernels/cuda/conv1d/convolution_kernel.cuh"
#include "kernels/cuda/conv1d/launch_conv.cuh"

namespace dpa::kernels::conv1d {

cudaError_t launch_in_place(const TensorMaps& maps, const ConvArgs& args, cudaStream_t stream) {
  return dispatch_value<64, 128>(args.plan.tile_columns, [&](auto columns) {
    constexpr int kColumns = columns.value;
    if (!args.normalisation.out) return launch_conv<float, kColumns, kInPlace>(maps, args, stream);
    return launch_normalised<float, kColumns, kInPlace>(maps, args, stream);
  });
}

}  // namespace dpa::kernels::conv1d
