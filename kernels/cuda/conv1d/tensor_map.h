// Tensor maps: descriptions of tensors in global memory for TMA.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace dpa::kernels::conv1d {

// A (planes, rows, columns) tensor of 16-bit elements, or of float32 that arrives rounded to tf32, columns side by side, of which boxes of
// (box_planes, box_rows, box_columns) are copied, every `row_step`-th row of it. A box's row that is 128 or 64 bytes wide
// is swizzled over that width, any other is not. `planes_inside`: a box lies as (rows, planes, columns), and its coordinates are in
// that order too.
struct Boxes {
  DType dtype;
  const void* data;
  int64_t planes, rows, columns;
  int box_planes, box_rows, box_columns, row_step;
  bool planes_inside = false;
};

cudaError_t make_map(const Boxes& boxes, CUtensorMap* map);

}  // namespace dpa::kernels::conv1d
