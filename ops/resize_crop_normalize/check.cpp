#include "ops/resize_crop_normalize/resize_crop_normalize.h"

namespace dpa {
namespace {

constexpr const char* kResize = "resize_crop_normalize";

void check_channels(const char* name, const OptionalTensor& given, const Tensor& image, const c10::SymInt& channels) {
  if (!given.has_value()) return;
  check_floating(kResize, name, *given);
  check_same_device(kResize, name, *given, "image", image);
  DPA_CHECK(given->dim() == 1 && given->sym_size(0) == channels, kResize,
            c10::str(name, " must have shape (C) = [", channels, "]"), given->sym_sizes());
}

}  // namespace

at::ScalarType image_type(const Tensor& image, std::optional<at::ScalarType> dtype) {
  if (dtype.has_value()) return *dtype;
  return image.scalar_type() == at::kByte ? at::kFloat : image.scalar_type();
}

ImageSizes check_resize_crop_normalize(const Tensor& image, at::OptionalSymIntArrayRef size,
                                       at::OptionalSymIntArrayRef crop, const OptionalTensor& mean,
                                       const OptionalTensor& std, bool hwc, std::optional<at::ScalarType> dtype) {
  const auto type = image.scalar_type();
  DPA_CHECK(
      type == at::kByte || type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16,
      kResize, "image must be uint8, float64, float32, float16 or bfloat16", type);
  DPA_CHECK(image.dim() == 4, kResize, c10::str("image must have 4 dimensions ", hwc ? "(B, H, W, C)" : "(B, C, H, W)"),
            "shape ", image.sym_sizes());
  const auto out = image_type(image, dtype);
  DPA_CHECK(out == at::kFloat || out == at::kDouble || out == at::kHalf || out == at::kBFloat16, kResize,
            "dtype must be float64, float32, float16 or bfloat16", out);
  const int first = hwc ? 1 : 2;
  ImageSizes s;
  s.batch = image.sym_size(0), s.channels = image.sym_size(hwc ? 3 : 1);
  s.height = s.resized_height = image.sym_size(first), s.width = s.resized_width = image.sym_size(first + 1);
  s.resizes = size.has_value();
  if (size.has_value()) {
    DPA_CHECK(size->size() == 2, kResize, "size must be (height, width)", *size);
    s.resized_height = (*size)[0], s.resized_width = (*size)[1];
    DPA_CHECK(s.resized_height >= 1 && s.resized_width >= 1, kResize, "size must be at least 1 each way", *size);
    DPA_CHECK(s.height >= 1 && s.width >= 1, kResize, "image must have at least one pixel where it is resized",
              "shape ", image.sym_sizes());
  }
  s.top = 0, s.left = 0, s.out_height = s.resized_height, s.out_width = s.resized_width;
  if (crop.has_value()) {
    DPA_CHECK(crop->size() == 4, kResize, "crop must be (top, left, height, width)", *crop);
    s.top = (*crop)[0], s.left = (*crop)[1], s.out_height = (*crop)[2], s.out_width = (*crop)[3];
    const bool inside = s.top >= 0 && s.left >= 0 && s.out_height >= 1 && s.out_width >= 1 &&
                        s.top <= s.resized_height - s.out_height && s.left <= s.resized_width - s.out_width;
    DPA_CHECK(inside, kResize,
              c10::str("crop must lie in the image of height ", s.resized_height, " and width ", s.resized_width),
              *crop);
  }
  check_channels("mean", mean, image, s.channels);
  check_channels("std", std, image, s.channels);
  return s;
}

}  // namespace dpa
