// CUDA launchers of `dpa::batch_norm_act` on channels-last images. Tensors are contiguous as (B, H, W, C), not empty and
// aligned to 16 bytes; optional ones may be null.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/plans/batch_norm_act/plan.h"

namespace dpa::kernels {

struct BatchNormAct {
  DType dtype{};            // of the images: float32 or 16 bits
  DType parameter_dtype{};  // of weight, bias and their gradients: `dtype` or float32
  BatchNormActShape shape;
  BatchNormActPlan plan;  // one that fits
  float eps;
  bool relu;
  const void* input;
  const void *weight, *bias;  // (C)
  const void* residual;
  float *mean, *var;  // (C): written by the forward, read by the backward
  float* partials;    // (2, plan.slices, C): what the first kernel leaves for the second
  void* out;          // not used by the backward
};

struct BatchNormActBackward {
  BatchNormAct forward;
  const void* grad;
  void* grad_input;
  void *grad_weight, *grad_bias;  // (C), or null
  void* grad_residual;            // or null
};

/// What the plan rests on of the current device.
BatchNormActDevice batch_norm_act_device();
cudaError_t batch_norm_act(const BatchNormAct& args, cudaStream_t stream);
cudaError_t batch_norm_act_backward(const BatchNormActBackward& args, cudaStream_t stream);

}  // namespace dpa::kernels
