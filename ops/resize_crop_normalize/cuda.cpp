#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <torch/library.h>

#include "ops/common/strides.h"
#include "ops/resize_crop_normalize/resize_crop_normalize.h"

namespace dpa {
namespace {

/// ATen's kernels are the fastest way where they serve: they refuse empty images, and windows that their shared memory does
/// not hold.
Tensor resized_by_aten(const Tensor& x, const ImageSizes& s, bool antialias) {
  constexpr int kMostShrinking = 8;
  const bool fits = s.height <= kMostShrinking * s.resized_height && s.width <= kMostShrinking * s.resized_width;
  if (x.numel() == 0 || !fits) return resized_and_cropped(x, s, antialias);
  const c10::SymInt sizes[] = {s.resized_height, s.resized_width};
  const auto whole = antialias ? at::_upsample_bilinear2d_aa_symint(x, sizes, /*align_corners=*/false)
                               : at::upsample_bilinear2d_symint(x, sizes, /*align_corners=*/false);
  return whole.narrow_symint(2, s.top, s.out_height).narrow_symint(3, s.left, s.out_width);
}

Tensor resize_crop_normalize_cuda(const Tensor& image, at::OptionalSymIntArrayRef size, at::OptionalSymIntArrayRef crop,
                                  const OptionalTensor& mean, const OptionalTensor& std, bool antialias, bool hwc,
                                  std::optional<at::ScalarType> dtype) {
  const auto s = check_resize_crop_normalize(image, size, crop, mean, std, hwc, dtype);
  return image_in_order(resize_crop_normalize_steps(image, s, mean, std, antialias, hwc, dtype, &resized_by_aten),
                        true);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) { m.impl("resize_crop_normalize", &resize_crop_normalize_cuda); }

}  // namespace dpa
