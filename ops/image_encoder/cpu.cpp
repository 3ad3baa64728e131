// The walk over an encoder's steps is kernels/cpu/encoder.h's, on feature maps in float32 whatever the weights are.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include "kernels/cpu/encoder.h"
#include "ops/common/dtype.h"
#include "ops/common/streaming.h"
#include "ops/common/team.h"
#include "ops/image_encoder/image_encoder.h"

namespace dpa {
namespace {

namespace conv2d = kernels::conv2d;
namespace cpu = kernels::cpu;
using conv2d::StepKind;

constexpr int64_t kMostElements = int64_t{1} << 31;

void check_reader(const char* op, const EncoderPlan& plan) {
  DPA_CHECK(cpu::reads_image_by_convolutions(plan.network), op,
            "config must read the image by convolutions alone on the CPU", "a step that does otherwise");
}

Tensor image_encoder_pack_cpu(at::TensorList parameters, at::IntArrayRef config, at::ScalarType dtype) {
  const auto plan = image_encoder_plan("image_encoder_pack", config, dtype);
  const auto convolutions = check_image_encoder_parameters(plan, parameters);
  check_reader("image_encoder_pack", plan);
  const auto type = kernel_dtype(dtype);
  auto packed = zeros_for_streaming(plan.bytes, parameters[0].options());
  for (const auto& conv : convolutions) {
    const auto& s = plan.network.steps[conv.step];
    const bool wide = cpu::packed_dtype(s, type) == kernels::DType::kFloat32;
    const auto weight = conv.weight.to(wide ? at::kFloat : dtype).contiguous();
    std::vector<Tensor> kept;
    const float* numbers[3] = {};
    const Tensor* const vectors[3] = {&conv.bias, &conv.scale, &conv.shift};
    for (int k = s.bias ? 0 : 1; k < 3; ++k)
      numbers[k] = kept.emplace_back(vectors[k]->contiguous()).const_data_ptr<float>();
    cpu::pack_convolution(s, conv.in_channels, type, weight.const_data_ptr(), numbers, plan.cpu_places[conv.step],
                          packed.mutable_data_ptr());
  }
  return packed;
}

/// The last feature map, inside its border, in PyTorch's order.
Tensor as_tensor(const cpu::Map& map, int64_t batch) {
  return at::from_blob(map.data, {batch, map.channels, map.height, map.width}, {map.sample(), 1, map.row(), map.pitch},
                       at::TensorOptions(at::kFloat));
}

Tensor encode(const EncoderPlan& plan, const EncoderCall& call, const Tensor& images, const Tensor& packed_,
              at::ArrayRef<double> constants, at::ScalarType dtype, at::OptionalSymIntArrayRef size,
              at::OptionalSymIntArrayRef crop) {
  constexpr const char* op = "image_encoder";
  auto out = empty_encoding(plan, call, dtype, images.options());
  if (images.size(0) == 0) return out;
  // Bytes may begin anywhere; the kernels read numbers.
  const bool aligned = reinterpret_cast<uintptr_t>(packed_.const_data_ptr()) % alignof(float) == 0;
  const auto packed = aligned ? packed_ : packed_.clone();
  const bool plain = !size.has_value() && !crop.has_value() && images.scalar_type() == at::kFloat;
  const auto prepared = plain ? images
                              : resize_crop_normalize(images, size, crop, std::nullopt, std::nullopt,
                                                      /*antialias=*/true, /*hwc=*/false, at::kFloat)
                                    .to(at::kFloat);

  std::string error;
  cpu::EncoderRun run = {};
  run.kernels = &cpu::choose_kernels(error);
  TORCH_CHECK(error.empty(), "dpa::", op, ": ", error);
  run.network = &plan.network, run.extents = &call.extents, run.places = &plan.cpu_places;
  run.dtype = kernel_dtype(dtype), run.batch = static_cast<int>(images.size(0));
  run.packed = packed.const_data_ptr(), run.constants = constants.data();
  run.images = prepared.const_data_ptr<float>();
  std::copy_n(prepared.strides().begin(), 4, run.image_strides);
  const auto last = plan.network.steps.back().kind;
  const bool pooled = last == StepKind::kAveragePool || last == StepKind::kSpatialSoftmax;
  run.result = pooled ? out.mutable_data_ptr<float>() : nullptr;
  const auto bytes = static_cast<int64_t>(cpu::place_maps(run, nullptr));
  for (const auto& map : run.maps)
    DPA_CHECK(run.batch * map.sample() < kMostElements, op,
              "images must make feature maps of fewer than 2^31 elements, paddings among them", "shape ",
              images.sizes());
  const auto workspace = at::empty({bytes}, packed.options());
  cpu::place_maps(run, workspace.mutable_data_ptr());
  run_as_team(
      cpu::useful_threads(run), [](int) {}, [&](cpu::Team& team, int thread) { cpu::run_encoder(run, team, thread); });
  if (!pooled) out.copy_(as_tensor(run.maps.back(), run.batch));
  return out;
}

std::vector<Tensor> image_encoder_cpu(at::TensorList images, at::TensorList packed, at::IntArrayRef config,
                                      at::ArrayRef<double> constants, at::ScalarType dtype,
                                      at::OptionalSymIntArrayRef size, at::OptionalSymIntArrayRef crop) {
  const auto plan = image_encoder_plan("image_encoder", config, dtype);
  const auto call = check_image_encoder(plan, images, packed, constants, dtype, size, crop);
  check_reader("image_encoder", plan);
  std::vector<Tensor> outs;
  for (size_t i = 0; i < images.size(); ++i)
    outs.push_back(encode(plan, call, images[i], packed[i], constants, dtype, size, crop));
  return outs;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("image_encoder", &image_encoder_cpu);
  m.impl("image_encoder_pack", &image_encoder_pack_cpu);
}

}  // namespace dpa
