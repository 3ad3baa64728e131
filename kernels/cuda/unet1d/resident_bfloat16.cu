// The one-sample kernel for weights in bfloat16, a group a slice.
#include "kernels/cuda/unet1d/resident_kernel.cuh"

template cudaError_t dpa::kernels::unet1d::launch_resident<__nv_bfloat16, dpa::kernels::unet1d::SoloForm::kPlain>(
    const Arguments& a, cudaStream_t stream);
