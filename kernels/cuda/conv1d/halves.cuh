// halves.cu: the convolutions of pairs of float16 numbers.
#pragma once
#include "kernels/cuda/conv1d/convolution_kernel.cuh"

namespace dpa::kernels::conv1d {

cudaError_t launch_halves(bool dgrad, int columns, const TensorMaps& maps, const ConvArgs& args, cudaStream_t stream);

}  // namespace dpa::kernels::conv1d
