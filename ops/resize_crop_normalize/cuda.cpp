#include <torch/library.h>

#include "ops/common/strides.h"
#include "ops/resize_crop_normalize/resize_crop_normalize.h"

namespace dpa {
namespace {

Tensor resize_crop_normalize_cuda(const Tensor& image, at::OptionalSymIntArrayRef size, at::OptionalSymIntArrayRef crop,
                                  const OptionalTensor& mean, const OptionalTensor& std, bool antialias, bool hwc,
                                  std::optional<at::ScalarType> dtype) {
  return image_in_order(resize_crop_normalize_formula(image, size, crop, mean, std, antialias, hwc, dtype), true);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) { m.impl("resize_crop_normalize", &resize_crop_normalize_cuda); }

}  // namespace dpa
