// One-dimensional convolutions over tensors in (batch, time, channels) order, as three products on Hopper's tensor
// cores.
//
// A convolution joins a narrow and a wide tensor (as long as each other where the stride is 1) by a weight (d0, d1,
// taps):
//   gather           narrow[b, t, i] = sum over j, k of  weight[i, j, k] wide[b, stride t + k - padding, j]
//   scatter          wide[b, u, j]   = sum over i, k, t with u = stride t + k - padding of  weight[i, j, k] narrow[b,
//   t, i] weight_gradient  weight[i, j, k] = sum over b, t of  narrow[b, t, i] wide[b, stride t + k - padding, j]
// A Conv1d gathers forward and scatters its gradient back; a ConvTranspose1d, whose weight is (in, out, taps) too, the
// other way round. Both have the same weight gradient.
//
// Products read 16-bit tensors, rows of channels padded with zeros to a multiple of 8, and packed weights
// (taps, d0, d1 padded to a multiple of 8); they write rows that are not padded. Sums are float32, in an order that the
// sizes alone determine.
#pragma once
#include <cuda_runtime_api.h>

#include "kernels/conv1d/shape.h"

namespace dpa::kernels::conv1d {

// Whether the current device and this build have the instructions.
bool supported();

// What is added to a product before it is rounded; either may be null.
struct Addends {
  const void* bias;      // (channels of the output), in `bias_dtype`
  DType bias_dtype;      // float32 or the dtype of the tensors
  const void* residual;  // of the output's shape and dtype
};

// Sizes are such that `serves` (plan.h) accepts them; pointers are aligned to 16 bytes. Errors are the launch's own.
cudaError_t gather(const Conv1d& conv, const void* wide, const void* weight, const Addends& addends, void* narrow,
                   cudaStream_t stream);
cudaError_t scatter(const Conv1d& conv, const void* narrow, const void* weight, const Addends& addends, void* wide,
                    cudaStream_t stream);
// `gradient` is (d0, d1, taps) in `gradient_dtype`, float32 or the dtype of the tensors.
cudaError_t weight_gradient(const Conv1d& conv, const void* narrow, const void* wide, void* gradient,
                            DType gradient_dtype, cudaStream_t stream);

// (d0, d1, taps), of `source_dtype` float32 or `dtype`, to (taps, d0, padded d1) of `dtype`.
cudaError_t pack_weight(DType source_dtype, DType dtype, const void* weight, int64_t d0, int64_t d1, int taps,
                        void* packed, cudaStream_t stream);
// `rows` rows of `channels` 16-bit elements to rows of padded(channels).
cudaError_t pad_rows(const void* rows, int64_t count, int64_t channels, void* out, cudaStream_t stream);

}  // namespace dpa::kernels::conv1d
