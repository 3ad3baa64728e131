#include <torch/library.h>

#include "ops/common/strides.h"
#include "ops/resize_crop_normalize/resize_crop_normalize.h"

namespace dpa {
namespace {

Tensor resize_crop_normalize_meta(const Tensor& image, at::OptionalSymIntArrayRef size, at::OptionalSymIntArrayRef crop,
                                  const OptionalTensor& mean, const OptionalTensor& std, bool /*antialias*/, bool hwc,
                                  std::optional<at::ScalarType> dtype) {
  const auto s = check_resize_crop_normalize(image, size, crop, mean, std, hwc, dtype);
  return empty_image(s.batch, s.channels, s.out_height, s.out_width, /*channels_last=*/true,
                     image.options().dtype(image_type(image, dtype)));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) { m.impl("resize_crop_normalize", &resize_crop_normalize_meta); }

}  // namespace dpa
