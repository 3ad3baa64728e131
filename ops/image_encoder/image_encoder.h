// `dpa::image_encoder`: whole image encoders on packed weights, without gradients: resize, crop, convolutions with what
// follows them, pools, keypoints; one launch a step for all networks, channels-last. The networks differ by their weights
// alone, and each has images of its own, of equal sizes.
//
// `config` is the network as kernels/plans/conv2d/network.h reads it: the images' channels, then 11 integers a step;
// `constants` has one number a step: a GroupNorm's eps, the temperature of keypoints. Packed weights are bytes: what
// `image_encoder_pack` makes of each convolution's weight, bias (where it has one), scale and shift.
#pragma once
#include <memory>

#include "kernels/plans/conv2d/network.h"
#include "ops/common/check.h"
#include "ops/resize_crop_normalize/resize_crop_normalize.h"

namespace dpa {

/// The network, and where its packed weights lie.
struct EncoderPlan {
  kernels::conv2d::Network network;
  std::vector<kernels::conv2d::PackedOffsets> places, cpu_places;
  int64_t bytes;  // of packed weights
};

/// Raises what is wrong with `config` or the dtype.
EncoderPlan image_encoder_plan(const char* op, at::IntArrayRef config, at::ScalarType dtype);

/// A convolution of a plan's steps and its tensors among the parameters.
struct ConvolutionParameters {
  size_t step;
  int in_channels;
  Tensor weight, bias, scale, shift;  // bias: undefined where the step has none
};
/// The convolutions in the steps' order. Raises what is wrong with `parameters`.
std::vector<ConvolutionParameters> check_image_encoder_parameters(const EncoderPlan& plan, at::TensorList parameters);

/// Sizes of a call: what comes before the network, and its feature maps.
struct EncoderCall {
  ImageSizes image;
  std::vector<kernels::conv2d::Extent> extents;
};
EncoderCall check_image_encoder(const EncoderPlan& plan, at::TensorList images, at::TensorList packed,
                                at::ArrayRef<double> constants, at::ScalarType dtype, at::OptionalSymIntArrayRef size,
                                at::OptionalSymIntArrayRef crop);

/// A network's result, of undefined values: (B, C) or (B, K, 2) in float32 of a pool at the end, else a feature map
/// (B, C, H, W) of `dtype`, channels-last.
Tensor empty_encoding(const EncoderPlan& plan, const EncoderCall& call, at::ScalarType dtype,
                      const at::TensorOptions& options);

}  // namespace dpa
