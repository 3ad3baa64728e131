// The walk over the steps of encoders that are alike: each is a launch of kernels/cuda/conv2d for all of them, convolutions
// that depend on nobody among them share one, and so do a first layer and its max pooling. Messages between blocks begin as
// zeros in every call, which its first launch writes, so a call keeps nothing and calls may overlap.
#include "ops/common/cuda.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "kernels/cuda/common/test_limits.h"
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
  const int reserved = attribute(cudaDevAttrReservedSharedMemoryPerBlock),
            most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), block = kernels::limited_shared_bytes(most);
  device.multiprocessors = kernels::limited_multiprocessors(attribute(cudaDevAttrMultiProcessorCount));
  device.shared = block < most ? block + reserved : attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  device.wgmma = conv2d::has_wgmma();
  return device;
}

/// The launches of so many networks for images of a size.
struct Launches {
  conv2d::Device device;
  std::map<size_t, conv2d::StepPlan> convs;  // by their first steps
  bool stem = false;                         // the first two steps are one launch
};

Launches make_launches(const conv2d::Network& network, const std::vector<conv2d::Extent>& extents, kernels::DType dtype,
                       int batch, int networks, const conv2d::Device& device) {
  const auto shape = [&](size_t i) { return conv2d::shape_of_step(network, i, dtype, batch, extents); };
  Launches made = {device, {}, conv2d::is_stem(network, 0) && conv2d::serves_stem(shape(0), device)};
  for (size_t i = made.stem ? 2 : 0; i < network.steps.size(); ++i) {
    if (network.steps[i].kind != StepKind::kConv || network.steps[i].together) continue;
    std::vector<conv2d::Shape> shapes;
    for (size_t k = i; k < network.steps.size() && (k == i || network.steps[k].together); ++k)
      shapes.push_back(shape(k));
    made.convs[i] = conv2d::plan_step(shapes, device, networks);
  }
  return made;
}

std::shared_ptr<const Launches> launches_of(const EncoderPlan& plan, const EncoderCall& call, at::IntArrayRef config,
                                            kernels::DType dtype, int networks, int index) {
  constexpr size_t kMaxKept = 64;
  static std::mutex mutex;
  static std::map<std::vector<int64_t>, std::shared_ptr<const Launches>> kept;
  const int batch = static_cast<int>(call.image.batch.expect_int());
  auto key = config.vec();
  for (const int64_t value : {int64_t{batch}, int64_t{call.extents[0].height}, int64_t{call.extents[0].width},
                              static_cast<int64_t>(dtype), int64_t{networks}, int64_t{index}})
    key.push_back(value);
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = kept.find(key); found != kept.end()) return found->second;
  auto made = std::make_shared<const Launches>(
      make_launches(plan.network, call.extents, dtype, batch, networks, properties(index)));
  if (kept.size() >= kMaxKept) kept.clear();
  return kept[key] = made;
}

/// Networks of the same steps on images of equal sizes, which share every launch.
class Walk {
 public:
  Walk(const EncoderPlan& plan, const EncoderCall& call, const Launches& launches, at::TensorList images,
       at::TensorList packed, at::TensorList outs, at::ArrayRef<double> constants, at::ScalarType dtype)
      : network_(plan.network),
        plan_(plan),
        call_(call),
        launches_(launches),
        images_(images),
        outs_(outs),
        constants_(constants),
        dtype_(kernel_dtype(dtype)),
        networks_(static_cast<int>(images.size())),
        batch_(static_cast<int>(call.image.batch.expect_int())),
        options_(packed[0].options().dtype(dtype)),
        stream_(c10::cuda::getCurrentCUDAStream()) {
    for (const Tensor& one : packed) packed_.push_back(aligned(one));
    last_use_.assign(network_.steps.size() + 1, 0);
    for (size_t i = 0; i < network_.steps.size(); ++i)
      for (const int map : {network_.steps[i].from, network_.steps[i].residual})
        if (map >= 0) last_use_[map] = i;
    int64_t words = kEpochWords;
    for (const auto& [first, launch] : launches_.convs)
      for (size_t k = 0; k < launch.plans.size(); ++k) words += networks_ * words_of(first + k, launch.plans[k]);
    messages_ = at::empty({words}, packed[0].options().dtype(at::kInt));
  }

  void run() {
    maps_.resize(network_.steps.size() + 1);
    prepare();
    for (size_t i = 0; i < network_.steps.size();) {
      const size_t count = i == 0 && launches_.stem                    ? stem()
                           : network_.steps[i].kind == StepKind::kConv ? convolve(i)
                                                                       : pool(i);
      for (size_t map = 0; map < i + count; ++map)
        if (last_use_[map] < i + count) maps_[map] = Tensor();
      i += count;
    }
  }

 private:
  static constexpr int64_t kEpochWords = 32;

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
  const uint8_t* packed(int network) const { return static_cast<const uint8_t*>(packed_[network].const_data_ptr()); }

  /// Feature maps as the kernels have them, one behind the other; the last ones are the results' memory.
  void make_map(size_t map, int64_t height, int64_t width, int channels) {
    if (map < network_.steps.size())
      maps_[map] = at::empty({networks_ * batch_, height, width, conv2d::padded(dtype_, channels)}, options_);
  }
  void make_output(size_t step) {
    const auto& e = call_.extents[step + 1];
    make_map(step + 1, e.height, e.width, e.channels);
  }
  void* map_of(size_t map, int network) const {
    if (map == network_.steps.size()) return outs_[network].mutable_data_ptr();
    return static_cast<uint8_t*>(maps_[map].mutable_data_ptr()) + maps_[map].nbytes() / networks_ * network;
  }

  void prepare() {
    const auto& s = call_.image;
    const auto number = [](const c10::SymInt& value) { return static_cast<int>(value.expect_int()); };
    const auto type = images_[0].scalar_type();
    conv2d::Preprocess p = {};
    p.pixel = type == at::kByte ? conv2d::Pixel::kUint8
                                : (type == at::kFloat ? conv2d::Pixel::kFloat32 : conv2d::Pixel::kBFloat16);
    p.batch = batch_, p.height = number(s.height), p.width = number(s.width), p.channels = network_.channels;
    p.resized_height = number(s.resized_height), p.resized_width = number(s.resized_width);
    p.top = number(s.top), p.left = number(s.left);
    p.crop_height = number(s.out_height), p.crop_width = number(s.out_width);
    p.antialias = true, p.cells = network_.cells;
    std::fill_n(p.inverse_std, 4, 1.0f);
    const int cell = p.cells ? 2 : 1;
    make_map(0, (p.crop_height + cell - 1) / cell, (p.crop_width + cell - 1) / cell, network_.channels * cell * cell);
    conv2d::Preprocesses all = {};
    all.messages = messages_.mutable_data_ptr(), all.message_pieces = messages_.numel() / 4;
    for (const Tensor& image : images_) {
      p.image = image.const_data_ptr();
      p.stride_n = image.stride(0), p.stride_c = image.stride(1);
      p.stride_y = image.stride(2), p.stride_x = image.stride(3);
      p.out = map_of(0, all.count);
      all.items[all.count++] = p;
    }
    C10_CUDA_CHECK(conv2d::launch_preprocess(dtype_, all, /*dependent=*/false, stream_));
  }

  const float* parameters_of(size_t step, int network) const {
    return reinterpret_cast<const float*>(packed(network) + plan_.places[step].parameters);
  }

  size_t stem() {
    const auto& s = network_.steps[0];
    make_output(1);
    conv2d::Stems all = {};
    for (int network = 0; network < networks_; ++network) {
      auto one = conv2d::stem_of(shape(0));
      const auto* const parameters = parameters_of(0, network);
      one.x = map_of(0, network), one.weights = packed(network) + plan_.places[0].weights;
      one.out = map_of(2, network), one.relu = s.relu;
      one.bias = s.bias ? parameters : nullptr;
      one.scale = parameters + s.out_channels, one.shift = parameters + 2 * s.out_channels;
      all.stems[all.count++] = one;
    }
    const auto& device = launches_.device;
    C10_CUDA_CHECK(conv2d::launch_stems(dtype_, all, conv2d::stem_blocks(shape(0), device, networks_), device.wgmma,
                                        /*dependent=*/true, stream_));
    return 2;
  }

  conv2d::Conv conv(size_t step, int network, const conv2d::StepPlan& step_plan, const conv2d::ConvPlan& p) {
    const auto& s = network_.steps[step];
    const auto* const parameters = parameters_of(step, network);
    auto conv = conv2d::conv_of(shape(step), p, step_plan.deferred && p.exchange);
    conv.x = map_of(s.from, network), conv.weights = packed(network) + plan_.places[step].weights;
    conv.residual = s.residual < 0 ? nullptr : map_of(s.residual, network);
    conv.out = map_of(step + 1, network);
    conv.bias = s.bias ? parameters : nullptr;
    conv.scale = parameters + s.out_channels, conv.shift = parameters + 2 * s.out_channels;
    conv.partials = message(p.partial_words()), conv.moments = message(p.moment_words(shape(step)));
    conv.eps = static_cast<float>(constants_[step]), conv.relu = s.relu;
    return conv;
  }

  size_t convolve(size_t first) {
    const auto& step_plan = launches_.convs.at(first);
    const size_t count = step_plan.plans.size();
    DPA_CHECK(count > 0, "image_encoder", "images must be of a size that the kernels serve", "step ", first);
    conv2d::Launch launch = {};
    launch.epoch = epoch(), launch.waits = step_plan.waits;
    for (size_t k = 0; k < count; ++k) make_output(first + k);
    for (int network = 0; network < networks_; ++network)
      for (size_t k = 0; k < count; ++k) {
        auto& made = launch.convs[launch.count++] = conv(first + k, network, step_plan, step_plan.plans[k]);
        made.first_block = launch.blocks;
        launch.blocks += made.blocks;
      }
    C10_CUDA_CHECK(conv2d::launch_convs(dtype_, step_plan.tiling, launch, /*dependent=*/true, stream_));
    is_raw_ = count == 1 && launch.convs[0].deferred && conv2d::is_pooled(network_, first);
    if (is_raw_) {  // the pooling that follows normalises it
      std::copy_n(launch.convs, launch.count, raw_.convs);
      return count;
    }
    for (int k = 0; k < launch.count; ++k)
      if (launch.convs[k].deferred)
        C10_CUDA_CHECK(conv2d::launch_normalise(dtype_, launch.convs[k], epoch(), 3 * launches_.device.multiprocessors,
                                                /*dependent=*/true, stream_));
    return count;
  }

  size_t pool(size_t step) {
    const auto& s = network_.steps[step];
    const auto &in = call_.extents[s.from], &made = call_.extents[step + 1];
    const auto kind = s.kind == StepKind::kMaxPool       ? conv2d::PoolKind::kMax
                      : s.kind == StepKind::kAveragePool ? conv2d::PoolKind::kAverage
                                                         : conv2d::PoolKind::kSpatialSoftmax;
    make_output(step);
    conv2d::Pool p = {};
    p.batch = batch_, p.height = in.height, p.width = in.width, p.channels = in.channels;
    p.pieces = conv2d::pieces_of(dtype_, in.channels), p.out_height = made.height, p.out_width = made.width;
    p.kernel = s.kernel, p.stride = s.stride, p.padding = s.padding;
    p.inverse_temperature = s.kind == StepKind::kSpatialSoftmax ? static_cast<float>(1 / constants_[step]) : 1.0f;
    conv2d::Pools all = {};
    for (; all.count < networks_; ++all.count) {
      p.x = map_of(s.from, all.count), p.out = map_of(step + 1, all.count);
      all.pools[all.count] = p;
    }
    if (is_raw_) {
      raw_.epoch = epoch();
      C10_CUDA_CHECK(conv2d::launch_normalised_pools(dtype_, all, raw_, 2 * launches_.device.multiprocessors,
                                                     /*dependent=*/true, stream_));
    } else {
      C10_CUDA_CHECK(conv2d::launch_pools(dtype_, kind, all, /*finished=*/nullptr, /*dependent=*/true, stream_));
    }
    is_raw_ = false;
    return 1;
  }

  const conv2d::Network& network_;
  const EncoderPlan& plan_;
  const EncoderCall& call_;
  const Launches& launches_;
  at::TensorList images_, outs_;
  at::ArrayRef<double> constants_;
  kernels::DType dtype_;
  int networks_, batch_;
  at::TensorOptions options_;
  c10::cuda::CUDAStream stream_;
  std::vector<Tensor> packed_;
  std::vector<size_t> last_use_;
  std::vector<Tensor> maps_;
  bool is_raw_ = false;  // whether the pooling that follows normalises what it reads
  conv2d::RawMaps raw_ = {};
  Tensor messages_;
  int64_t next_ = kEpochWords;
};

/// Networks that may share each launch.
size_t most_networks(const conv2d::Network& network) {
  size_t most = conv2d::kMaxNetworks;
  for (size_t i = 0, together = 1; i < network.steps.size(); ++i) {
    together = network.steps[i].together ? together + 1 : 1;
    most = std::min(most, static_cast<size_t>(conv2d::most_networks(together)));
  }
  return most;
}

std::vector<Tensor> image_encoder_cuda(at::TensorList images, at::TensorList packed, at::IntArrayRef config,
                                       at::ArrayRef<double> constants, at::ScalarType dtype,
                                       at::OptionalSymIntArrayRef size, at::OptionalSymIntArrayRef crop) {
  const auto plan = image_encoder_plan("image_encoder", config, dtype);
  const auto call = check_image_encoder(plan, images, packed, constants, dtype, size, crop);
  const c10::cuda::CUDAGuard guard(images[0].device());
  std::vector<Tensor> outs;
  for (size_t i = 0; i < images.size(); ++i) outs.push_back(empty_encoding(plan, call, dtype, images[0].options()));
  if (images[0].size(0) == 0) return outs;
  const size_t most = most_networks(plan.network);
  for (size_t i = 0, count; i < images.size(); i += count) {
    count = std::min(most, images.size() - i);
    const auto launches =
        launches_of(plan, call, config, kernel_dtype(dtype), static_cast<int>(count), images[0].device().index());
    Walk(plan, call, *launches, images.slice(i, count), packed.slice(i, count), at::TensorList(outs).slice(i, count),
         constants, dtype)
        .run();
  }
  return outs;
}

Tensor image_encoder_pack_cuda(at::TensorList parameters, at::IntArrayRef config, at::ScalarType dtype) {
  const auto plan = image_encoder_plan("image_encoder_pack", config, dtype);
  const auto convolutions = check_image_encoder_parameters(plan, parameters);
  const c10::cuda::CUDAGuard guard(parameters[0].device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto type = kernel_dtype(dtype);
  auto packed = at::zeros({plan.bytes}, parameters[0].options().dtype(at::kByte));
  for (const auto& conv : convolutions) {
    const auto& s = plan.network.steps[conv.step];
    const auto& place = plan.places[conv.step];
    const bool cells = plan.network.cells && conv.step == 0;
    const auto shape =
        cells ? conv2d::shape_of_cells(type, 1, 8, 8, s.out_channels)
              : conv2d::shape_of(type, 1, s.kernel, s.kernel, conv.in_channels, s.out_channels, s.kernel, 1, 0);
    const auto weight = conv.weight.contiguous();
    C10_CUDA_CHECK(conv2d::launch_pack(shape, weight.const_data_ptr<float>(), nullptr,
                                       static_cast<uint8_t*>(packed.mutable_data_ptr()) + place.weights, stream,
                                       cells));
    const int64_t row = int64_t{4} * s.out_channels;
    auto begin = static_cast<int64_t>(place.parameters);
    for (const auto& vector : {conv.bias, conv.scale, conv.shift}) {
      if (vector.defined()) packed.narrow(0, begin, row).view(at::kFloat).copy_(vector);
      begin += row;
    }
  }
  return packed;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("image_encoder", &image_encoder_cuda);
  m.impl("image_encoder_pack", &image_encoder_pack_cuda);
}

}  // namespace dpa
