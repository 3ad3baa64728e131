#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/image_encoder/image_encoder.h"

namespace dpa {
namespace {

std::vector<Tensor> image_encoder_meta(at::TensorList images, at::TensorList packed, at::IntArrayRef config,
                                       at::ArrayRef<double> constants, at::ScalarType dtype,
                                       at::OptionalSymIntArrayRef size, at::OptionalSymIntArrayRef crop) {
  const auto plan = image_encoder_plan("image_encoder", config, dtype);
  const auto call = check_image_encoder(plan, images, packed, constants, dtype, size, crop);
  std::vector<Tensor> outs;
  for (size_t i = 0; i < images.size(); ++i) outs.push_back(empty_encoding(plan, call, dtype, images[0].options()));
  return outs;
}

Tensor image_encoder_pack_meta(at::TensorList parameters, at::IntArrayRef config, at::ScalarType dtype) {
  const auto plan = image_encoder_plan("image_encoder_pack", config, dtype);
  check_image_encoder_parameters(plan, parameters);
  return at::empty({plan.bytes}, parameters[0].options().dtype(at::kByte));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("image_encoder", &image_encoder_meta);
  m.impl("image_encoder_pack", &image_encoder_pack_meta);
}

}  // namespace dpa
