// CUDA launcher of `dpa::fused_relu_add`.
#pragma once
#include "kernels/cuda/common/elementwise.h"

namespace dpa::kernels {

cudaError_t fused_relu_add(const Elementwise& args, double bias, cudaStream_t stream);

}  // namespace dpa::kernels
