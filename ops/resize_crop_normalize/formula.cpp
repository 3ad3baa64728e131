// `dpa::resize_crop_normalize` in ATen ops: what autograd differentiates. ATen's own resize adds gradients up by atomics on a
// GPU; the gradient of `index` is a sum in one order.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/index.h>
#include <ATen/ops/where.h>

#include "ops/resize_crop_normalize/resize_crop_normalize.h"

namespace dpa {
namespace {

/// Resizes the last dimension from `from` to `to` pixels, of which [start, start + count) are made: each is a weighted sum
/// over a triangle around its centre, as wide as the pixel where that shrinks and `antialias` is set. Beyond the border the
/// border's pixel counts.
Tensor resized(const Tensor& x, const c10::SymInt& from, const c10::SymInt& to, const c10::SymInt& start,
               const c10::SymInt& count, bool antialias) {
  const auto options = x.options().dtype(at::kDouble);
  const c10::SymFloat ratio = c10::SymFloat(from) / c10::SymFloat(to);
  const c10::SymFloat support = antialias ? ratio.max(1.0) : c10::SymFloat(1.0);
  const c10::SymInt taps = antialias ? ((from * 2 + to - 1) / to).max(2) : c10::SymInt(2);
  auto centre = (at::arange(count, options) + at::Scalar(start) + 0.5) * at::Scalar(ratio);
  if (!antialias) centre = centre.clamp(0.5, at::Scalar(c10::SymFloat(from) - 0.5));
  centre = centre.unsqueeze(-1);
  const auto places = (centre - at::Scalar(support) + 0.5).floor().clamp_min(0) + at::arange(taps, options);
  auto weights = (1 - (places + 0.5 - centre).abs() / at::Scalar(support)).clamp_min(0);
  weights = weights * (places < at::Scalar(from));
  const auto used = weights > 0;  // other pixels are not read: they may be infinite
  weights = (weights / weights.sum({-1}, /*keepdim=*/true)).to(x.scalar_type());
  const auto nearest = centre.floor().clamp_max(at::Scalar(from - 1));
  const auto pixels = at::where(used, places, nearest).to(at::kLong);
  const auto each = at::index(x, {std::nullopt, std::nullopt, std::nullopt, pixels}) * weights;
  return at::where(used, each, at::Scalar(0)).sum({-1});
}

}  // namespace

Tensor resized_and_cropped(const Tensor& x, const ImageSizes& s, bool antialias) {
  const auto rows = resized(x.transpose(2, 3), s.height, s.resized_height, s.top, s.out_height, antialias);
  return resized(rows.transpose(2, 3), s.width, s.resized_width, s.left, s.out_width, antialias);
}

Tensor resize_crop_normalize_steps(const Tensor& image, const ImageSizes& s, const OptionalTensor& mean,
                                   const OptionalTensor& std, bool antialias, bool hwc,
                                   std::optional<at::ScalarType> dtype, ResizeAndCrop resize) {
  const auto out = image_type(image, dtype);
  const bool wide = out == at::kDouble || image.scalar_type() == at::kDouble;
  auto x = (hwc ? image.permute({0, 3, 1, 2}) : image).to(wide ? at::kDouble : at::kFloat);
  if (image.scalar_type() == at::kByte) x = x / 255;
  x = s.resizes ? resize(x, s, antialias)
                : x.narrow_symint(2, s.top, s.out_height).narrow_symint(3, s.left, s.out_width);
  const auto along = [&](const Tensor& channels) { return channels.to(x.scalar_type()).unsqueeze(-1).unsqueeze(-1); };
  if (mean.has_value()) x = x - along(*mean);
  if (std.has_value()) x = x / along(*std);
  // Views, without a memory format, which vmap does not take.
  return x.to(out).permute({0, 2, 3, 1}).contiguous().permute({0, 3, 1, 2});
}

Tensor resize_crop_normalize_formula(const Tensor& image, at::OptionalSymIntArrayRef size,
                                     at::OptionalSymIntArrayRef crop, const OptionalTensor& mean,
                                     const OptionalTensor& std, bool antialias, bool hwc,
                                     std::optional<at::ScalarType> dtype) {
  const auto s = check_resize_crop_normalize(image, size, crop, mean, std, hwc, dtype);
  return resize_crop_normalize_steps(image, s, mean, std, antialias, hwc, dtype, &resized_and_cropped);
}

}  // namespace dpa
