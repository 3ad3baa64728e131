// The walk over an encoder's steps: each is a launch of kernels/cuda/conv2d, convolutions that depend on nobody among them
// share one. Messages between blocks begin as zeros in every call, so a call keeps nothing and calls may overlap.
#include "ops/common/cuda.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "kernels/cuda/conv2d/launch.h"
#include "ops/image_encoder/image_encoder.h"

namespace dpa {
namespace {

namespace conv2d = kernels::conv2d;
using conv2d::StepKind;

conv2d::Device properties(int index) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, index));
    return value;
  };
  conv2d::Device device;
  device.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  device.shared = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  return device;
}

/// The launches of a network for images of a size, by their first steps.
using Launches = std::map<size_t, conv2d::StepPlan>;

Launches make_launches(const conv2d::Network& network, const std::vector<conv2d::Extent>& extents, kernels::DType dtype,
                       int batch, const conv2d::Device& device) {
  Launches made;
  for (size_t i = 0; i < network.steps.size(); ++i) {
    if (network.steps[i].kind != StepKind::kConv || network.steps[i].together) continue;
    std::vector<conv2d::Shape> shapes;
    for (size_t k = i; k < network.steps.size() && (k == i || network.steps[k].together); ++k)
      shapes.push_back(conv2d::shape_of_step(network, k, dtype, batch, extents));
    made[i] = conv2d::plan_step(shapes, device);
  }
  return made;
}

std::shared_ptr<const Launches> launches_of(const EncoderPlan& plan, const EncoderCall& call, at::IntArrayRef config,
                                            kernels::DType dtype, int index) {
  constexpr size_t kMaxKept = 64;
  static std::mutex mutex;
  static std::map<std::vector<int64_t>, std::shared_ptr<const Launches>> kept;
  const int batch = static_cast<int>(call.image.batch.expect_int());
  auto key = config.vec();
  for (const int64_t value : {int64_t{batch}, int64_t{call.extents[0].height}, int64_t{call.extents[0].width},
                              static_cast<int64_t>(dtype), int64_t{index}})
    key.push_back(value);
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = kept.find(key); found != kept.end()) return found->second;
  auto made =
      std::make_shared<const Launches>(make_launches(plan.network, call.extents, dtype, batch, properties(index)));
  if (kept.size() >= kMaxKept) kept.clear();
  return kept[key] = made;
}

class Walk {
 public:
  Walk(const EncoderPlan& plan, const EncoderCall& call, const Launches& launches, const Tensor& packed,
       at::ArrayRef<double> constants, at::ScalarType dtype)
      : network_(plan.network),
        plan_(plan),
        call_(call),
        launches_(launches),
        packed_(packed),
        constants_(constants),
        dtype_(kernel_dtype(dtype)),
        batch_(static_cast<int>(call.image.batch.expect_int())),
        options_(packed.options().dtype(dtype)),
        stream_(c10::cuda::getCurrentCUDAStream()) {
    last_use_.assign(network_.steps.size() + 1, 0);
    for (size_t i = 0; i < network_.steps.size(); ++i)
      for (const int map : {network_.steps[i].from, network_.steps[i].residual})
        if (map >= 0) last_use_[map] = i;
    int64_t words = kEpochWords;
    for (const auto& [first, launch] : launches_)
      for (size_t k = 0; k < launch.plans.size(); ++k) words += words_of(first + k, launch.plans[k]);
    messages_ = at::zeros({words}, packed.options().dtype(at::kInt));
  }

  Tensor run(const Tensor& images, const Tensor& out) {
    maps_.resize(network_.steps.size() + 1);
    prepare(images);
    for (size_t i = 0; i < network_.steps.size();) {
      const size_t count = network_.steps[i].kind == StepKind::kConv ? convolve(i, out) : pool(i, out);
      for (size_t map = 0; map < i + count; ++map)
        if (last_use_[map] < i + count) maps_[map] = Tensor();
      i += count;
    }
    return out;
  }

 private:
  static constexpr int64_t kEpochWords = 32;

  bool is_last(size_t step) const { return step + 1 == network_.steps.size(); }
  conv2d::Shape shape(size_t step) const {
    return conv2d::shape_of_step(network_, step, dtype_, batch_, call_.extents);
  }
  /// Words of a convolution's messages, a multiple of 16 bytes.
  int64_t words_of(size_t step, const conv2d::ConvPlan& p) const {
    return static_cast<int64_t>((p.partial_words() + 31) / 32 * 32 + (p.moment_words(shape(step)) + 31) / 32 * 32);
  }
  uint32_t* message(size_t words) {
    auto* const at = static_cast<uint32_t*>(messages_.mutable_data_ptr()) + next_;
    next_ += static_cast<int64_t>((words + 31) / 32 * 32);
    return words ? at : nullptr;
  }
  const uint32_t* epoch() const { return static_cast<const uint32_t*>(messages_.const_data_ptr()); }
  /// A feature map as the kernels have it; the last one is the result's memory.
  void* map_of(size_t step, const Tensor& out) {
    if (is_last(step)) return out.mutable_data_ptr();
    const auto& e = call_.extents[step + 1];
    maps_[step + 1] = at::empty({batch_, e.height, e.width, conv2d::padded(dtype_, e.channels)}, options_);
    return maps_[step + 1].mutable_data_ptr();
  }

  void prepare(const Tensor& images) {
    const auto& s = call_.image;
    conv2d::Preprocess p = {};
    const auto number = [](const c10::SymInt& value) { return static_cast<int>(value.expect_int()); };
    const auto type = images.scalar_type();
    p.image = images.const_data_ptr();
    p.pixel = type == at::kByte ? conv2d::Pixel::kUint8
                                : (type == at::kFloat ? conv2d::Pixel::kFloat32 : conv2d::Pixel::kBFloat16);
    p.batch = batch_, p.height = number(s.height), p.width = number(s.width), p.channels = network_.channels;
    p.stride_n = images.stride(0), p.stride_c = images.stride(1);
    p.stride_y = images.stride(2), p.stride_x = images.stride(3);
    p.resized_height = number(s.resized_height), p.resized_width = number(s.resized_width);
    p.top = number(s.top), p.left = number(s.left);
    p.crop_height = number(s.out_height), p.crop_width = number(s.out_width);
    p.antialias = true, p.cells = network_.cells;
    std::fill_n(p.inverse_std, 4, 1.0f);
    const int64_t height = p.cells ? (p.crop_height + 1) / 2 : p.crop_height,
                  width = p.cells ? (p.crop_width + 1) / 2 : p.crop_width;
    maps_[0] = at::empty({batch_, height, width, conv2d::padded(dtype_, p.cells ? 12 : network_.channels)}, options_);
    p.out = maps_[0].mutable_data_ptr();
    C10_CUDA_CHECK(conv2d::launch_preprocess(dtype_, p, stream_));
  }

  size_t convolve(size_t first, const Tensor& out) {
    const auto& step_plan = launches_.at(first);
    DPA_CHECK(!step_plan.plans.empty(), "image_encoder", "images must be of a size that the kernels serve", "step ",
              first);
    conv2d::Launch launch = {};
    launch.epoch = epoch(), launch.waits = step_plan.waits;
    for (size_t k = 0; k < step_plan.plans.size(); ++k) {
      const auto& s = network_.steps[first + k];
      const auto& place = plan_.places[first + k];
      const auto& p = step_plan.plans[k];
      const auto* const base = static_cast<const uint8_t*>(packed_.const_data_ptr());
      const auto* const parameters = reinterpret_cast<const float*>(base + place.parameters);
      auto conv = conv2d::conv_of(shape(first + k), p, step_plan.deferred && p.exchange);
      conv.x = maps_[s.from].const_data_ptr(), conv.weights = base + place.weights;
      conv.residual = s.residual < 0 ? nullptr : maps_[s.residual].const_data_ptr();
      conv.out = map_of(first + k, out);
      conv.bias = s.bias ? parameters : nullptr;
      conv.scale = parameters + s.out_channels, conv.shift = parameters + 2 * s.out_channels;
      conv.partials = message(p.partial_words()), conv.moments = message(p.moment_words(shape(first + k)));
      conv.eps = static_cast<float>(constants_[first + k]), conv.relu = s.relu;
      conv.first_block = launch.blocks;
      launch.blocks += conv.blocks;
      launch.convs[launch.count++] = conv;
    }
    C10_CUDA_CHECK(conv2d::launch_convs(dtype_, step_plan.tiling, launch, /*dependent=*/true, stream_));
    for (int k = 0; k < launch.count; ++k)
      if (launch.convs[k].deferred)
        C10_CUDA_CHECK(conv2d::launch_normalise(dtype_, launch.convs[k], epoch(), 2 * processors(), true, stream_));
    return step_plan.plans.size();
  }

  size_t pool(size_t step, const Tensor& out) {
    const auto& s = network_.steps[step];
    const auto &in = call_.extents[s.from], &made = call_.extents[step + 1];
    const auto kind = s.kind == StepKind::kMaxPool       ? conv2d::PoolKind::kMax
                      : s.kind == StepKind::kAveragePool ? conv2d::PoolKind::kAverage
                                                         : conv2d::PoolKind::kSpatialSoftmax;
    conv2d::Pool p = {};
    p.x = maps_[s.from].const_data_ptr();
    p.out = map_of(step, out);
    p.batch = batch_, p.height = in.height, p.width = in.width, p.channels = in.channels;
    p.pieces = conv2d::pieces_of(dtype_, in.channels), p.out_height = made.height, p.out_width = made.width;
    p.kernel = s.kernel, p.stride = s.stride, p.padding = s.padding;
    p.inverse_temperature = s.kind == StepKind::kSpatialSoftmax ? static_cast<float>(1 / constants_[step]) : 1.0f;
    C10_CUDA_CHECK(conv2d::launch_pool(dtype_, kind, p, /*finished=*/nullptr, /*dependent=*/true, stream_));
    return 1;
  }

  int processors() const { return properties(packed_.device().index()).multiprocessors; }

  const conv2d::Network& network_;
  const EncoderPlan& plan_;
  const EncoderCall& call_;
  const Launches& launches_;
  const Tensor& packed_;
  at::ArrayRef<double> constants_;
  kernels::DType dtype_;
  int batch_;
  at::TensorOptions options_;
  c10::cuda::CUDAStream stream_;
  std::vector<size_t> last_use_;
  std::vector<Tensor> maps_;
  Tensor messages_;
  int64_t next_ = kEpochWords;
};

Tensor image_encoder_cuda(const Tensor& images, const Tensor& packed, at::IntArrayRef config,
                          at::ArrayRef<double> constants, at::ScalarType dtype, at::OptionalSymIntArrayRef size,
                          at::OptionalSymIntArrayRef crop) {
  const auto plan = image_encoder_plan("image_encoder", config, dtype);
  const auto call = check_image_encoder(plan, images, packed, constants, dtype, size, crop);
  const c10::cuda::CUDAGuard guard(images.device());
  auto out = empty_encoding(plan, call, dtype, images.options());
  if (images.size(0) == 0) return out;
  const auto launches = launches_of(plan, call, config, kernel_dtype(dtype), images.device().index());
  const auto held = aligned(packed);
  return Walk(plan, call, *launches, held, constants, dtype).run(images, out);
}

Tensor image_encoder_pack_cuda(at::TensorList parameters, at::IntArrayRef config, at::ScalarType dtype) {
  const auto plan = image_encoder_plan("image_encoder_pack", config, dtype);
  check_image_encoder_parameters(plan, parameters);
  const c10::cuda::CUDAGuard guard(parameters[0].device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto packed = at::zeros({plan.bytes}, parameters[0].options().dtype(at::kByte));
  std::vector<int> channels = {plan.network.channels};
  size_t next = 0;
  for (size_t i = 0; i < plan.network.steps.size(); ++i) {
    const auto& s = plan.network.steps[i];
    const int in = channels[s.from];
    channels.push_back(s.kind == StepKind::kConv ? s.out_channels : in);
    if (s.kind != StepKind::kConv) continue;
    const bool cells = plan.network.cells && i == 0;
    const auto type = kernel_dtype(dtype);
    const auto shape = cells ? conv2d::shape_of_cells(type, 1, 8, 8, s.out_channels)
                             : conv2d::shape_of(type, 1, s.kernel, s.kernel, in, s.out_channels, s.kernel, 1, 0);
    const auto weight = parameters[next++].contiguous();
    C10_CUDA_CHECK(conv2d::launch_pack(shape, weight.const_data_ptr<float>(), nullptr,
                                       static_cast<uint8_t*>(packed.mutable_data_ptr()) + plan.places[i].weights,
                                       stream, cells));
    const int64_t row = int64_t{4} * s.out_channels;
    for (int k = s.bias ? 0 : 1; k < 3; ++k)
      packed.narrow(0, static_cast<int64_t>(plan.places[i].parameters) + k * row, row)
          .view(at::kFloat)
          .copy_(parameters[next++]);
  }
  return packed;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("image_encoder", &image_encoder_cuda);
  m.impl("image_encoder_pack", &image_encoder_pack_cuda);
}

}  // namespace dpa
