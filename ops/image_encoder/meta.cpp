#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/image_encoder/image_encoder.h"

namespace dpa {
namespace {

Tensor image_encoder_meta(const Tensor& images, const Tensor& packed, at::IntArrayRef config,
                          at::ArrayRef<double> constants, at::ScalarType dtype, at::OptionalSymIntArrayRef size,
                          at::OptionalSymIntArrayRef crop) {
  const auto plan = image_encoder_plan("image_encoder", config, dtype);
  return empty_encoding(plan, check_image_encoder(plan, images, packed, constants, dtype, size, crop), dtype,
                        images.options());
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
