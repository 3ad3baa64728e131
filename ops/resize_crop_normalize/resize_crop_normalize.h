// `dpa::resize_crop_normalize`: from camera images to what an encoder takes, in one pass.
#pragma once
#include <ATen/core/IListRef.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include "ops/common/check.h"
#include "ops/common/op.h"

namespace dpa {

/// Through the dispatcher.
inline constexpr Op<"resize_crop_normalize",
                    Tensor(const Tensor& image, at::OptionalSymIntArrayRef size, at::OptionalSymIntArrayRef crop,
                           const OptionalTensor& mean, const OptionalTensor& std, bool antialias, bool hwc,
                           std::optional<at::ScalarType> dtype)>
    resize_crop_normalize;

/// The sizes of a call: the image's, what it is resized to, and the crop's place and sizes in that.
struct ImageSizes {
  c10::SymInt batch, channels, height, width, resized_height, resized_width, top, left, out_height, out_width;
  bool resizes;
};

/// Checks the arguments and says their sizes.
ImageSizes check_resize_crop_normalize(const Tensor& image, at::OptionalSymIntArrayRef size,
                                       at::OptionalSymIntArrayRef crop, const OptionalTensor& mean,
                                       const OptionalTensor& std, bool hwc, std::optional<at::ScalarType> dtype);

/// The dtype of the output.
at::ScalarType image_type(const Tensor& image, std::optional<at::ScalarType> dtype);

/// (B, C, H, W) resized, and what the crop leaves of it, by ATen ops that sum in one order and take any size.
Tensor resized_and_cropped(const Tensor& x, const ImageSizes& s, bool antialias);

/// The op in ATen ops, with this resize.
using ResizeAndCrop = Tensor (*)(const Tensor& x, const ImageSizes& s, bool antialias);
Tensor resize_crop_normalize_steps(const Tensor& image, const ImageSizes& s, const OptionalTensor& mean,
                                   const OptionalTensor& std, bool antialias, bool hwc,
                                   std::optional<at::ScalarType> dtype, ResizeAndCrop resize);

/// The op in ATen ops, to be differentiated.
Tensor resize_crop_normalize_formula(const Tensor& image, at::OptionalSymIntArrayRef size,
                                     at::OptionalSymIntArrayRef crop, const OptionalTensor& mean,
                                     const OptionalTensor& std, bool antialias, bool hwc,
                                     std::optional<at::ScalarType> dtype);

}  // namespace dpa
