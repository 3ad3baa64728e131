// The convolutions of an image encoder on float16 (convolution.cu).
#define DPA_CONV_KERNEL
#include "kernels/cuda/conv2d/conv_kernel.cuh"

namespace dpa::kernels::conv2d {

DPA_CONV_KERNELS(device::Fp16)

}  // namespace dpa::kernels::conv2d
