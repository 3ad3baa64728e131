// CUDA launchers of a convolution of images of few channels, as an encoder's first layer is, in training: its forward
// and its weight's gradient. Both multiply in TF32, which holds 16-bit values as they are.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace dpa::kernels::conv2d {

/// Strides are in elements; the output and its gradient are (batch, out_height, out_width, out_channels) in memory.
struct FewChannels {
  DType dtype{};  // of all tensors: float32 or 16 bits
  int64_t batch, channels, height, width;
  int64_t image_strides[4];  // (batch, channels, height, width)
  int64_t out_channels, out_height, out_width;
  int taps, padding;          // each way; the stride is 2
  int64_t weight_strides[4];  // (out_channels, channels, height, width), of the gradient too
};

/// Whether the kernels take the sizes on the current device.
bool takes_few_channels(const FewChannels& conv);
/// `out` is aligned to 16 bytes.
cudaError_t few_channels_fprop(const FewChannels& conv, const void* image, const void* weight, void* out,
                               cudaStream_t stream);
/// Bytes that `few_channels_wgrad` wants between its kernels.
int64_t few_channels_workspace(const FewChannels& conv);
/// `grad` and `workspace` are aligned to 16 bytes.
cudaError_t few_channels_wgrad(const FewChannels& conv, const void* image, const void* grad, void* workspace,
                               void* grad_weight, cudaStream_t stream);

}  // namespace dpa::kernels::conv2d
