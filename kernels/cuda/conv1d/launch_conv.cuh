// The kernel of convolution_kernel.cuh for operands that have files of their own.
#pragma once
#include "kernels/cuda/conv1d/convolution.cuh"

namespace dpa::kernels::conv1d {

// halves.cu: pairs of float16 numbers.
cudaError_t launch_halves(bool dgrad, int columns, const TensorMaps& maps, const ConvArgs& args, cudaStream_t stream);
// in_place.cu: weights as they lie in the parameter.
cudaError_t launch_in_place(const TensorMaps& maps, const ConvArgs& args, cudaStream_t stream);

}  // namespace dpa::kernels::conv1d
