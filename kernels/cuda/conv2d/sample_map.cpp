#include "kernels/cuda/conv2d/sample_map.h"

#include "kernels/cuda/common/driver.h"
#include "kernels/plans/conv1d/plan.h"

namespace dpa::kernels::conv2d {

cudaError_t make_sample_map(const float* images, int64_t batch, int64_t height, int64_t width, int64_t channels,
                            int columns, CUtensorMap* map) {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  if (!encode) return cudaErrorNotSupported;
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t sizes[4] = {size(channels), size(batch), size(width), size(height)};
  const cuuint64_t strides[3] = {size(height * width * channels * 4), size(channels * 4), size(width * channels * 4)};
  const cuuint32_t box[4] = {32, conv1d::kTf32Samples, static_cast<cuuint32_t>(columns), 1}, steps[4] = {1, 1, 1, 1};
  // TMA rounds float32 to tf32 on its way, where wgmma alone would truncate.
  const auto result = encode(map, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, 4, const_cast<float*>(images), sizes, strides, box,
                             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace dpa::kernels::conv2d
