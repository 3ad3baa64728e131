// CUDA launchers of `dpa::group_norm_mish` and its backward on channels-last activations, which are (B, L, C) in
// memory, of 16 bits or float32, where a plan fits. Optional pointers may be null; tensors are not empty, and aligned to 16 bytes,
// as are the rows of `scale` and `shift`.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/plans/group_norm_mish/plan.h"

namespace dpa::kernels::channels_last {

struct GroupNormMish {
  DType dtype{};          // of everything but weight and bias
  DType parameter_dtype;  // of weight, bias and their gradients: `dtype`, or float32 where that has 16 bits
  NormShape shape;
  NormPlan plan;  // from `teams`, one that fits
  double eps;
  const void* input;
  const void *weight, *bias;  // (C)
  const void *scale, *shift;  // (B, C), rows `scale_stride` and `shift_stride` elements apart
  int64_t scale_stride, shift_stride;
  const void* residual;  // (B, C, L), channels-last
  void* out;             // (B, C, L), channels-last
  // Of float32: the output as convolutions read it (conv1d.h), in planes of halves. `out` may then be null.
  void* halves = nullptr;
};

struct GroupNormMishBackward {
  GroupNormMish forward;          // `residual` and `out` are not used
  const void* grad;               // (B, C, L), channels-last
  void* grad_input;               // (B, C, L), channels-last
  void *grad_scale, *grad_shift;  // (B, C), contiguous
  float* partials;  // (2, slices, C), `slices` from plan.h: what each slice of the samples adds to the gradients of
                    // weight and bias; null where neither is wanted
  bool early;       // what `forward` points to is safe to read before the grid dependency resolves (conv1d.h)
  bool sums;        // a third row of partials: grad_input added up over samples and time, which is the gradient of a
                    // bias that was added to the input
};

/// Gradients as sums over the slices of what backwards wrote: sums[i] = sum over s of partials[i, s].
struct SliceSums {
  DType dtype;  // of the sums: float32 or 16 bits
  int64_t channels, slices;
  const float* partials;  // (gradients, slices, C)
  int gradients;
  void* sums[6];  // (C) each, or null where it is not wanted
};

cudaError_t forward(const GroupNormMish& args, cudaStream_t stream);
cudaError_t backward(const GroupNormMishBackward& args, cudaStream_t stream);
cudaError_t add_slices(const SliceSums& args, cudaStream_t stream);

}  // namespace dpa::kernels::channels_last
