// CUDA launchers of `dpa::group_norm_act` on channels-last images. Tensors are contiguous as (B, H, W, C), not empty and
// aligned to 16 bytes; optional ones may be null.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/plans/group_norm_act/plan.h"

namespace dpa::kernels {

struct GroupNormAct {
  DType dtype{};            // of the images: float32 or 16 bits
  DType parameter_dtype{};  // of weight and bias: `dtype` or float32
  GroupNormActShape shape;
  GroupNormActPlan plan;  // one that fits
  float eps;
  bool relu;
  const void* input;
  const void *weight, *bias;  // (C)
  const void* residual;
  void* out;  // not used by the backward
};

struct GroupNormActBackward {
  GroupNormAct forward;
  const void* grad;
  void* grad_input;
  void* grad_residual;  // or null
  float* partials;      // (2, B, C): each sample's share in the gradients of weight and bias; or null
};

cudaError_t group_norm_act(const GroupNormAct& args, cudaStream_t stream);
cudaError_t group_norm_act_backward(const GroupNormActBackward& args, cudaStream_t stream);

}  // namespace dpa::kernels
