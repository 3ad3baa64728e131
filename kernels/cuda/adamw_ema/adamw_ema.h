// CUDA launcher of `dpa::adamw_ema_`: one step of AdamW on many tensors, with the moving averages of the results.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/math/adamw.h"

namespace dpa::kernels {

/// A parameter and what belongs to it, `count` elements each, in one order in memory.
struct AdamWTensor {
  void *param, *grad, *exp_avg, *exp_avg_sq;
  void* average;  // of the accumulate type of `param`, or null in all tensors of a call
  float* step;    // one number
  int64_t count;
};

struct AdamWEma {
  DType dtype, grad_dtype;  // of params and moments, of gradients: equal, or 16 bits beside float32
  const AdamWTensor* tensors;
  int64_t tensor_count;
  double lr, beta1, beta2, weight_decay, eps;
  const float* lr_at;       // in place of `lr`, or null
  const float* grad_scale;  // gradients are divided by it, or null
  const float* found_inf;   // other than 0: only the averages move; or null
  const void* clip;         // gradients are multiplied by it, of the accumulate type; or null
  const int64_t* updates;   // of the averages before this one; null where there are none
  math::EmaSchedule schedule;
  bool maximize, decoupled, clear;
  void* scratch;  // adamw_ema_scratch(tensor_count) bytes
};

size_t adamw_ema_scratch(int64_t tensor_count);
cudaError_t adamw_ema(const AdamWEma& args, cudaStream_t stream);

}  // namespace dpa::kernels
