#include "kernels/cuda/conv2d/input_map.h"

#include "kernels/cuda/common/driver.h"

namespace dpa::kernels::conv2d {

cudaError_t make_input_map(DType dtype, const Conv& c, int rows, CUtensorMap* map) {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  if (!encode) return cudaErrorNotSupported;
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const int64_t row = int64_t{c.pieces} * kPieceBytes, images = c.batch_rows / (c.out_height * c.out_width);
  const cuuint64_t sizes[4] = {size(row / element_size(dtype)), size(c.width), size(c.height), size(images)};
  const cuuint64_t strides[3] = {size(row), size(row * c.width), size(row * c.width * c.height)};
  // Where the first tap of the first output lies, and how far beyond the image's end those of the outputs may: what is left
  // for the last one.
  const int lower[2] = {-c.pad_left, -c.pad_top};
  const int upper[2] = {(c.out_width - 1) * c.stride + 1 - c.pad_left - c.width,
                        (c.out_height - 1) * c.stride + 1 - c.pad_top - c.height};
  const auto stride = static_cast<cuuint32_t>(c.stride);
  const cuuint32_t steps[4] = {1, stride, stride, 1};
  // TMA rounds float32 to tf32 on its way, where wgmma alone would truncate.
  const auto type = dtype == DType::kFloat32    ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                    : dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto result = encode(map, type, 4, const_cast<void*>(c.x), sizes, strides, lower, upper,
                             static_cast<cuuint32_t>(kChunkBytes / element_size(dtype)), static_cast<cuuint32_t>(rows),
                             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace dpa::kernels::conv2d
