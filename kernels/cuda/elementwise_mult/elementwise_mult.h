// CUDA launcher of `dpa::elementwise_mult`.
#pragma once
#include "kernels/cuda/common/elementwise.h"

namespace dpa::kernels {

cudaError_t elementwise_mult(const Elementwise& args, cudaStream_t stream);

}  // namespace dpa::kernels
