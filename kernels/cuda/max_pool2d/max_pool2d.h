// CUDA launchers of `dpa::max_pool2d` on channels-last images, (B, H, W, C) in memory, not empty and aligned to 16
// bytes, C a whole number of 16-byte vectors.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace dpa::kernels {

struct MaxPool2d {
  DType dtype{};  // float32 or 16 bits
  int64_t batch, channels, height, width;
  int64_t out_height, out_width;
  int kernel, stride, padding;
};

/// Whether rows are whole vectors and 32-bit numbers count them.
bool max_pool2d_fits(const MaxPool2d& args, int element_size);
/// `taps`, uint8 as `out`: where in its window each maximum lies, row by row; or null.
cudaError_t max_pool2d(const MaxPool2d& args, const void* input, void* out, uint8_t* taps, cudaStream_t stream);
cudaError_t max_pool2d_backward(const MaxPool2d& args, const void* grad, const uint8_t* taps, void* grad_input,
                                cudaStream_t stream);

}  // namespace dpa::kernels
