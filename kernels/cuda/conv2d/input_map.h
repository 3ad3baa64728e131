// Tensor maps of convolutions' inputs: what TMA needs to know of an image to bring the pixels under a tap.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernels/cuda/conv2d/conv2d.h"

namespace dpa::kernels::conv2d {

struct InputMaps {
  CUtensorMap maps[kMaxConvs];
};

/// Of boxes of 128 bytes of the channels of the pixels under a tap, for `rows` neighbouring outputs.
cudaError_t make_input_map(DType dtype, const Conv& conv, int rows, CUtensorMap* map);

}  // namespace dpa::kernels::conv2d
