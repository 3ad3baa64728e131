// The convolutions of an image encoder on float32, multiplied in TF32 (convolution.cu).
#define DPA_CONV_KERNEL
#include "kernels/cuda/conv2d/conv_kernel.cuh"

namespace dpa::kernels::conv2d {

DPA_CONV_KERNELS(device::Tf32)

}  // namespace dpa::kernels::conv2d
