// The one-sample kernel for weights in float32, any groups.
#include "kernels/cuda/unet1d/resident_kernel.cuh"

template cudaError_t dpa::kernels::unet1d::launch_resident<float, dpa::kernels::unet1d::SoloForm::kParts>(
    const Arguments& a, cudaStream_t stream);
