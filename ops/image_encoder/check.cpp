#include <ATen/ops/empty.h>

#include <algorithm>

#include "kernels/cpu/encoder.h"
#include "ops/common/dtype.h"
#include "ops/common/strides.h"
#include "ops/image_encoder/image_encoder.h"

namespace dpa {
namespace {

namespace conv2d = kernels::conv2d;
using conv2d::StepKind;

constexpr const char* kEncoder = "image_encoder";
constexpr int64_t kMaxSide = 1 << 14;
constexpr int64_t kMaxElements = int64_t{1} << 31;

}  // namespace

EncoderPlan image_encoder_plan(const char* op, at::IntArrayRef config, at::ScalarType dtype) {
  EncoderPlan plan;
  const auto wrong = conv2d::read_network(config.data(), config.size(), plan.network);
  DPA_CHECK(wrong.empty(), op, "config must hold: " + wrong, config);
  DPA_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, op,
            "dtype must be float32, float16 or bfloat16", dtype);
  // As many bytes on every device, though they hold other things: the rule of shapes knows no device.
  const auto type = kernel_dtype(dtype);
  plan.bytes = static_cast<int64_t>(std::max(conv2d::places_of(plan.network, type, plan.places),
                                             kernels::cpu::encoder_places(plan.network, type, plan.cpu_places)));
  return plan;
}

std::vector<ConvolutionParameters> check_image_encoder_parameters(const EncoderPlan& plan, at::TensorList parameters) {
  constexpr const char* op = "image_encoder_pack";
  size_t count = 0;
  const auto next = [&](const char* name, std::vector<int64_t> shape) {
    DPA_CHECK(count < parameters.size(), op, "parameters must hold every convolution's weight, bias, scale and shift",
              parameters.size());
    const Tensor& given = parameters[count++];
    DPA_CHECK(given.scalar_type() == at::kFloat && given.layout() == at::kStrided, op,
              c10::str("parameters must be strided and float32, so must a ", name), given.scalar_type());
    check_same_device(op, name, given, "the first parameter", parameters[0]);
    DPA_CHECK(given.sizes() == at::IntArrayRef(shape), op, c10::str(name, " must have shape ", at::IntArrayRef(shape)),
              given.sizes());
    return given;
  };
  std::vector<ConvolutionParameters> convolutions;
  std::vector<int> channels = {plan.network.channels};
  for (size_t i = 0; i < plan.network.steps.size(); ++i) {
    const auto& s = plan.network.steps[i];
    const int in = channels[s.from], out = s.kind == StepKind::kConv ? s.out_channels : in;
    channels.push_back(out);
    if (s.kind != StepKind::kConv) continue;
    auto& made = convolutions.emplace_back(ConvolutionParameters{i, in, {}, {}, {}, {}});
    made.weight = next("weight", {out, in, s.kernel, s.kernel});
    if (s.bias) made.bias = next("bias", {out});
    made.scale = next("scale", {out}), made.shift = next("shift", {out});
  }
  DPA_CHECK(count > 0 && count == parameters.size(), op,
            c10::str("parameters must be the ", count, " tensors of the convolutions, of which there must be one"),
            parameters.size());
  return convolutions;
}

EncoderCall check_image_encoder(const EncoderPlan& plan, at::TensorList images, at::TensorList packed,
                                at::ArrayRef<double> constants, at::ScalarType dtype, at::OptionalSymIntArrayRef size,
                                at::OptionalSymIntArrayRef crop) {
  DPA_CHECK(!images.empty(), kEncoder, "images must hold a tensor for each network", "none");
  DPA_CHECK(packed.size() == images.size(), kEncoder,
            c10::str("packed must hold a tensor for each of the ", images.size(), " in images"), packed.size());
  const Tensor& first = images[0];
  const auto type = first.scalar_type();
  DPA_CHECK(type == at::kByte || type == at::kFloat || type == at::kBFloat16, kEncoder,
            "images must be uint8, float32 or bfloat16", type);
  for (const Tensor& image : images) {
    DPA_CHECK(image.dim() == 4 && image.sym_size(1) == plan.network.channels && image.layout() == at::kStrided,
              kEncoder, c10::str("images must be strided, of shape (B, ", plan.network.channels, ", H, W)"), "shape ",
              image.sym_sizes());
    DPA_CHECK(image.scalar_type() == type && image.sym_sizes() == first.sym_sizes(), kEncoder,
              c10::str("images must have one dtype and one shape, ", type, " ", first.sym_sizes()), image.scalar_type(),
              " ", image.sym_sizes());
    check_same_device(kEncoder, "images", image, "the first of them", first);
  }
  for (const Tensor& one : packed) {
    DPA_CHECK(one.scalar_type() == at::kByte && one.layout() == at::kStrided && one.dim() == 1 &&
                  one.sym_size(0) == plan.bytes && one.is_contiguous(),
              kEncoder, c10::str("packed must be the ", plan.bytes, " bytes that image_encoder_pack makes"),
              one.scalar_type(), " ", one.sym_sizes());
    check_same_device(kEncoder, "packed", one, "images", first);
  }
  DPA_CHECK(constants.size() == plan.network.steps.size(), kEncoder, "constants must hold one number a step",
            constants.size());
  for (size_t i = 0; i < constants.size(); ++i) {
    const auto kind = plan.network.steps[i].kind;
    DPA_CHECK(constants[i] >= 0 && (kind != StepKind::kSpatialSoftmax || constants[i] > 0), kEncoder,
              "constants must be an eps of at least 0, or a temperature above 0", constants[i]);
  }
  EncoderCall call;
  call.image = check_resize_crop_normalize(first, size, crop, std::nullopt, std::nullopt, /*hwc=*/false, dtype);
  const int64_t height = call.image.out_height.expect_int(), width = call.image.out_width.expect_int();
  DPA_CHECK(height >= 1 && width >= 1 && height <= kMaxSide && width <= kMaxSide && call.image.height <= kMaxSide &&
                call.image.width <= kMaxSide,
            kEncoder, "images must be of 1 to 16384 pixels each way", "shape ", first.sym_sizes());
  const auto wrong = conv2d::extents_of(plan.network, static_cast<int>(height), static_cast<int>(width), call.extents);
  DPA_CHECK(wrong.empty(), kEncoder, "images must be " + wrong, "shape ", first.sym_sizes());
  for (const auto& e : call.extents)
    DPA_CHECK(first.sym_size(0) * (int64_t{e.height + 1} * (e.width + 1) * (e.channels + 16)) < kMaxElements, kEncoder,
              "images must make feature maps of fewer than 2^31 elements", "shape ", first.sym_sizes());
  return call;
}

Tensor empty_encoding(const EncoderPlan& plan, const EncoderCall& call, at::ScalarType dtype,
                      const at::TensorOptions& options) {
  const auto& last = call.extents.back();
  const auto kind = plan.network.steps.back().kind;
  const auto& batch = call.image.batch;
  const c10::SymInt channels = last.channels;
  if (kind == StepKind::kAveragePool) return at::empty_symint({batch, channels}, options.dtype(at::kFloat));
  if (kind == StepKind::kSpatialSoftmax) return at::empty_symint({batch, channels, 2}, options.dtype(at::kFloat));
  const int64_t width = conv2d::padded(kernel_dtype(dtype), last.channels);
  return at::empty_symint({batch, last.height, last.width, width}, options.dtype(dtype))
      .narrow(3, 0, last.channels)
      .permute({0, 3, 1, 2});
}

}  // namespace dpa
