// CUDA launchers of `own::swiglu`: contiguous tensors of `count` elements. No Torch here.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace own {

cudaError_t swiglu_cuda(dpa::kernels::DType dtype, const void* gate, const void* value, void* out, int64_t count,
                        cudaStream_t stream);
cudaError_t swiglu_backward_cuda(dpa::kernels::DType dtype, const void* grad, const void* gate, const void* value,
                                 void* grad_gate, void* grad_value, int64_t count, cudaStream_t stream);

}  // namespace own
