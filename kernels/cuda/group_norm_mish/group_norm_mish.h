// CUDA launchers of `dpa::group_norm_mish`. All tensors are contiguous and of one dtype; optional ones may be null.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace dpa::kernels {

struct GroupNormMish {
  DType dtype;
  const void* input;          // (batch, channels, inner)
  const void *weight, *bias;  // (channels)
  const void *scale, *shift;  // (batch, channels)
  void* out;                  // (batch, channels, inner)
  int64_t batch, channels, inner;
  int64_t groups;
  double eps;
};

struct GroupNormMishBackward {
  GroupNormMish forward;  // `out` is not used
  const void* grad;       // (batch, channels, inner)
  void* grad_input;       // (batch, channels, inner), or null
  void* sums;             // (4, batch, channels) in the dtype of the arithmetic: each sample's share in the gradients
                          // of weight and bias, and the gradients of scale and shift
};

cudaError_t group_norm_mish(const GroupNormMish& args, cudaStream_t stream);
cudaError_t group_norm_mish_backward(const GroupNormMishBackward& args, cudaStream_t stream);

}  // namespace dpa::kernels
