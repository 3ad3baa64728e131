// `dpa::resize_crop_normalize` in ATen ops: what autograd differentiates, and what runs on a GPU.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/upsample_bilinear2d.h>

#include "ops/resize_crop_normalize/resize_crop_normalize.h"

namespace dpa {

Tensor resize_crop_normalize_formula(const Tensor& image, at::OptionalSymIntArrayRef size,
                                     at::OptionalSymIntArrayRef crop, const OptionalTensor& mean,
                                     const OptionalTensor& std, bool antialias, bool hwc,
                                     std::optional<at::ScalarType> dtype) {
  const auto s = check_resize_crop_normalize(image, size, crop, mean, std, hwc, dtype);
  const auto out = image_type(image, dtype);
  const bool wide = out == at::kDouble || image.scalar_type() == at::kDouble;
  auto x = (hwc ? image.permute({0, 3, 1, 2}) : image).to(wide ? at::kDouble : at::kFloat);
  if (image.scalar_type() == at::kByte) x = x / 255;
  const c10::SymInt sizes[] = {s.resized_height, s.resized_width};
  if (s.resizes && x.sym_numel() == 0)  // which ATen resizes not in every case
    x = x.sum({2, 3}, /*keepdim=*/true).expand_symint({s.batch, s.channels, s.resized_height, s.resized_width});
  else if (s.resizes)
    x = antialias ? at::_upsample_bilinear2d_aa_symint(x, sizes, /*align_corners=*/false)
                  : at::upsample_bilinear2d_symint(x, sizes, /*align_corners=*/false);
  if (crop.has_value()) x = x.narrow_symint(2, s.top, s.out_height).narrow_symint(3, s.left, s.out_width);
  const auto along = [&](const Tensor& channels) { return channels.to(x.scalar_type()).unsqueeze(-1).unsqueeze(-1); };
  if (mean.has_value()) x = x - along(*mean);
  if (std.has_value()) x = x / along(*std);
  // Views, without a memory format, which vmap does not take.
  return x.to(out).permute({0, 2, 3, 1}).contiguous().permute({0, 3, 1, 2});
}

}  // namespace dpa
