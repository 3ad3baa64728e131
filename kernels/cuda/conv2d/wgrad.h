// CUDA launchers of the weight's gradient of a convolution of images in TF32, by wgmma.
#pragma once
#include <cuda_runtime_api.h>

#include "kernels/plans/conv2d/wgrad_plan.h"

namespace dpa::kernels::conv2d {

/// Whether it is for these sizes and the current device.
bool takes_image_wgrad(const ImageWgrad& conv);
/// Bytes that `image_wgrad` wants between its kernels.
int64_t image_wgrad_workspace(const ImageWgrad& conv);
/// gradient[i, j, r, s] = sum over n, p, q of y[n, p, q, i] x[n, stride p + r - padding, stride q + s - padding, j], of
/// sizes that `takes_image_wgrad` takes, on Hopper. Infinity and NaN in x may reach taps beside those that meet them,
/// which multiply them by zeros beyond y's edge. `strides` are the gradient's, in elements; x, y and the workspace are
/// aligned to 16 bytes.
cudaError_t image_wgrad(const ImageWgrad& conv, const float* x, const float* y, float* workspace, float* gradient,
                        const int64_t (&strides)[4], cudaStream_t stream);

}  // namespace dpa::kernels::conv2d
