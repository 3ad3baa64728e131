#include "kernels/cuda/conv1d/tensor_map.h"

#include "kernels/cuda/common/driver.h"

namespace dpa::kernels::conv1d {
cudaError_t make_map(const Boxes& boxes, CUtensorMap* map) {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  if (!encode) return cudaErrorNotSupported;
  const cuuint64_t element = boxes.dtype == DType::kFloat32 ? 4 : 2;
  const auto columns = static_cast<cuuint64_t>(boxes.columns), rows = static_cast<cuuint64_t>(boxes.rows);
  const cuuint64_t row_bytes = columns * element;
  const int of_rows = boxes.planes_inside ? 2 : 1, of_planes = 3 - of_rows;
  cuuint64_t sizes[3] = {columns}, strides[2];
  sizes[of_rows] = rows, strides[of_rows - 1] = row_bytes;
  sizes[of_planes] = static_cast<cuuint64_t>(boxes.planes), strides[of_planes - 1] = row_bytes * rows;
  const auto step = static_cast<cuuint32_t>(boxes.row_step);
  cuuint32_t box[3] = {static_cast<cuuint32_t>(boxes.box_columns)}, steps[3] = {1, 1, 1};
  box[of_rows] = static_cast<cuuint32_t>(boxes.box_rows) * step, steps[of_rows] = step;
  box[of_planes] = static_cast<cuuint32_t>(boxes.box_planes);
  const auto width = boxes.box_columns * element;
  const auto swizzle = width == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                       : width == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                     : CU_TENSOR_MAP_SWIZZLE_NONE;
  // TMA rounds float32 to tf32 on its way, where wgmma alone would truncate.
  const auto type = boxes.dtype == DType::kFloat32    ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                    : boxes.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto result =
      encode(map, type, 3, const_cast<void*>(boxes.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace dpa::kernels::conv1d
