#include "kernels/plans/conv2d/network.h"

#include <algorithm>

namespace dpa::kernels::conv2d {
namespace {

constexpr int64_t kMaxChannels = 1 << 16, kMaxSteps = 1 << 10;

std::string of_step(size_t i, const char* what) { return "step " + std::to_string(i) + " must " + what; }

std::string wrong_with(const Step& s, size_t i, const std::vector<Step>& before) {
  const int count = static_cast<int>(i) + 1;
  if (s.from < 0 || s.from >= count) return of_step(i, "read the image or the output of a step before it");
  if (s.kind == StepKind::kConv) {
    if (s.out_channels < 1 || s.out_channels > kMaxChannels) return of_step(i, "have 1 to 65536 output channels");
    if (s.kernel < 1 || s.kernel > kMaxKernel) return of_step(i, "have a kernel of 1 to 15 taps each way");
    if (s.groups < 0 || (s.groups > 0 && s.out_channels % s.groups != 0))
      return of_step(i, "have a num_groups that divides its output channels, or 0");
    if (s.residual < -1 || s.residual >= count) return of_step(i, "add the output of a step before it");
  } else if (s.kind == StepKind::kMaxPool) {
    if (s.kernel < 1 || s.kernel > kMaxChannels) return of_step(i, "have a window of 1 pixel or more");
    if (2 * s.padding > s.kernel) return of_step(i, "pad by half of its window at most");
  }
  if (s.stride < 1 || s.stride > kMaxChannels || s.padding < 0 || s.padding > kMaxChannels)
    return of_step(i, "have a stride of 1 or more and a padding of 0 or more");
  if (s.from > 0 && before[s.from - 1].kind >= StepKind::kAveragePool) return of_step(i, "read a feature map");
  if (s.residual > 0 && before[s.residual - 1].kind >= StepKind::kAveragePool) return of_step(i, "add a feature map");
  if (!s.together) return {};
  size_t first = i;
  while (first > 0 && (first == i || before[first].together)) first--;
  const bool convs = s.kind == StepKind::kConv && i > 0 && before[first].kind == StepKind::kConv;
  if (!convs || i - first >= kMaxTogether || s.from > static_cast<int>(first) || s.residual > static_cast<int>(first))
    return of_step(i, "be a convolution that depends on none of those it runs together with");
  return {};
}

/// Whether the first layer alone reads the images, and is the usual one of 7 x 7.
bool takes_cells(const Network& network) {
  int readers = 0;
  for (const Step& s : network.steps) readers += (s.from == 0) + (s.residual == 0);
  const Step& s = network.steps.front();
  return network.channels == 3 && readers == 1 && s.from == 0 && s.kind == StepKind::kConv && s.kernel == 7 &&
         s.stride == 2 && s.padding == 3;
}

}  // namespace

std::string read_network(const int64_t* config, size_t count, Network& network) {
  if (count < 1 + kStepFields || (count - 1) % kStepFields != 0 || count > 1 + kMaxSteps * kStepFields)
    return "the images' channels and 11 integers a step";
  for (size_t i = 0; i < count; i++)
    if (config[i] < -1 || config[i] > kMaxChannels) return "integers from -1 to 65536";
  if (config[0] < 1 || config[0] > 4) return "images of 1 to 4 channels";
  network = {static_cast<int>(config[0]), false, {}};
  for (size_t at = 1; at < count; at += kStepFields) {
    int f[kStepFields];
    std::copy_n(config + at, kStepFields, f);
    if (f[0] < 0 || f[0] > static_cast<int>(StepKind::kSpatialSoftmax))
      return of_step(network.steps.size(), "be a convolution or a pool (0 to 3)");
    const Step step = {
        static_cast<StepKind>(f[0]), f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8] > 0, f[9] > 0, f[10] > 0};
    const auto wrong = wrong_with(step, network.steps.size(), network.steps);
    if (!wrong.empty()) return wrong;
    network.steps.push_back(step);
  }
  network.cells = takes_cells(network);
  return {};
}

std::string extents_of(const Network& network, int height, int width, std::vector<Extent>& extents) {
  extents = {{height, width, network.channels}};
  for (size_t i = 0; i < network.steps.size(); i++) {
    const Step& s = network.steps[i];
    const Extent in = extents[s.from];
    const auto out = [&](int n) { return (n + 2 * s.padding - s.kernel) / s.stride + 1; };
    if (s.kind >= StepKind::kAveragePool) {
      extents.push_back({1, 1, in.channels});
      continue;
    }
    if (in.height + 2 * s.padding < s.kernel || in.width + 2 * s.padding < s.kernel)
      return "large enough for one output of step " + std::to_string(i);
    extents.push_back({out(in.height), out(in.width), s.kind == StepKind::kConv ? s.out_channels : in.channels});
    const Extent &made = extents.back(), *more = s.residual < 0 ? nullptr : &extents[s.residual];
    if (more && (more->height != made.height || more->width != made.width || more->channels != made.channels))
      return "of a size at which the residual of step " + std::to_string(i) + " has the size of its output";
  }
  return {};
}

Shape shape_of_step(const Network& network, size_t i, DType dtype, int batch, const std::vector<Extent>& extents) {
  const Step& s = network.steps[i];
  const Extent in = extents[s.from];
  if (network.cells && i == 0) return shape_of_cells(dtype, batch, in.height, in.width, s.out_channels, s.groups);
  return shape_of(dtype, batch, in.height, in.width, in.channels, s.out_channels, s.kernel, s.stride, s.padding,
                  s.groups);
}

size_t places_of(const Network& network, DType dtype, std::vector<PackedOffsets>& places) {
  size_t bytes = 0;
  std::vector<int> channels = {network.channels};  // of the feature maps
  places.clear();
  for (size_t i = 0; i < network.steps.size(); i++) {
    const Step& s = network.steps[i];
    const int in = channels[s.from];
    PackedOffsets place;
    if (s.kind == StepKind::kConv) {
      const Shape shape =  // the weights' form does not depend on the images' size
          network.cells && i == 0 ? shape_of_cells(dtype, 1, 8, 8, s.out_channels)
                                  : shape_of(dtype, 1, kMaxKernel, kMaxKernel, in, s.out_channels, s.kernel, 1, 0);
      place.weights = bytes, place.parameters = bytes + weight_bytes(shape);
      bytes = (place.parameters + size_t{12} * s.out_channels + 127) / 128 * 128;
    }
    channels.push_back(s.kind == StepKind::kConv ? s.out_channels : in);
    places.push_back(place);
  }
  return bytes;
}

StepPlan plan_step(const std::vector<Shape>& shapes, const Device& device, int networks) {
  for (const Choice& choice : candidates(shapes.front(), device, networks)) {
    StepPlan p = {choice.plan.tiling, choice.plan.blocks() * networks, choice.deferred, false, {choice.plan}};
    p.waits = choice.plan.waits(choice.deferred);
    for (size_t i = 1; i < shapes.size(); i++) {
      ConvPlan other;
      if (!make_plan(shapes[i], p.tiling, 1, other)) break;
      p.waits |= other.waits(choice.deferred), p.blocks += other.blocks() * networks;
      p.plans.push_back(other);
    }
    if (p.plans.size() != shapes.size()) continue;
    if (p.waits && p.blocks > resident_blocks(p.tiling, device)) {
      if (choice.plan.splits > 1) continue;
      p.deferred = true, p.waits = false;
    }
    return p;
  }
  return {};
}

bool is_pooled(const Network& network, size_t i) {
  if (i + 1 >= network.steps.size()) return false;
  const Step &conv = network.steps[i], &pool = network.steps[i + 1];
  const int map = static_cast<int>(i) + 1;
  int readers = 0;
  for (const Step& s : network.steps) readers += (s.from == map) + (s.residual == map);
  return conv.kind == StepKind::kConv && conv.residual < 0 && pool.kind == StepKind::kMaxPool && pool.from == map &&
         pool.kernel == 3 && readers == 1;
}

bool is_stem(const Network& network, size_t i) {
  if (!network.cells || i != 0 || !is_pooled(network, 0)) return false;
  const Step &conv = network.steps[0], &pool = network.steps[1];
  return pool.stride == 2 && pool.padding == 1 && conv.groups == 0 && conv.out_channels == kStemColumns;
}

}  // namespace dpa::kernels::conv2d
