// Tensor maps of images for the weight's gradient.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace dpa::kernels::conv2d {

/// Images (batch, height, width, channels) in float32, which arrives rounded to tf32. A box: 32 channels of `columns`
/// neighbouring pixels of a row, of eight images; it lies as (columns, images, channels), rows of 128 bytes swizzled.
/// Coordinates are (channel, image, column, row).
cudaError_t make_sample_map(const float* images, int64_t batch, int64_t height, int64_t width, int64_t channels,
                            int columns, CUtensorMap* map);

}  // namespace dpa::kernels::conv2d
