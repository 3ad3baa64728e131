#include "kernels/cpu/encoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace dpa::kernels::cpu {
namespace {

using conv2d::Network;
using conv2d::PackedOffsets;
using conv2d::Step;
using conv2d::StepKind;

Weights kind_of(DType dtype, bool from_image) {
  if (from_image || dtype == DType::kFloat32) return Weights::kFloat32;
  return dtype == DType::kFloat16 ? Weights::kFloat16 : Weights::kBFloat16;
}
int weights_of_a_word(Weights kind) { return kind == Weights::kFloat32 ? 1 : 2; }
int pitch_of(int channels, bool image) { return image ? channels : padded(channels); }
/// Words of a panel, a row of taps and an output.
int steps_of(const Step& s, int in_channels, Weights kind) {
  return s.kernel * pitch_of(in_channels, s.from == 0) / weights_of_a_word(kind);
}

/// The part of [0, count) that a thread does.
template <class F>
void share_rows(Team& team, int thread, int64_t count, const F& each) {
  team.share(thread, count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) each(i);
  });
}

void clear_border(const Map& map, int64_t row) {
  if (map.border == 0) return;
  const int rows = map.height + 2 * map.border, b = static_cast<int>(row / rows);
  const int y = static_cast<int>(row % rows) - map.border;
  const auto clear = [&](int x, int count) { std::fill_n(map.at(b, y, x), int64_t{count} * map.pitch, 0.0f); };
  if (y < 0 || y >= map.height) return clear(-map.border, map.width + 2 * map.border);
  clear(-map.border, map.border);
  clear(map.width, map.border);
}

void copy_image(const EncoderRun& run, int64_t row) {
  const Map& map = run.maps[0];
  const int b = static_cast<int>(row / map.height), y = static_cast<int>(row % map.height);
  const auto& strides = run.image_strides;
  const float* from = run.images + b * strides[0] + y * strides[2];
  float* to = map.at(b, y, 0);
  for (int x = 0; x < map.width; x++)
    for (int c = 0; c < map.channels; c++) *to++ = from[c * strides[1] + x * strides[3]];
}

void convolve(const EncoderRun& run, size_t i, Team& team, int thread) {
  const Step& s = run.network->steps[i];
  const PackedOffsets& place = (*run.places)[i];
  const auto& kernels = run.kernels->images;
  const auto* const base = static_cast<const char*>(run.packed);
  const auto* const parameters = reinterpret_cast<const float*>(base + place.parameters);
  Conv2d c = {};
  c.in = run.maps[s.from], c.out = run.maps[i + 1];
  if (s.residual >= 0) c.residual = run.maps[s.residual];
  c.kind = kind_of(run.dtype, s.from == 0);
  c.weights = reinterpret_cast<const uint32_t*>(base + place.weights);
  c.taps = s.kernel, c.steps = steps_of(s, c.in.channels, c.kind), c.panels = padded(s.out_channels) / kPanel;
  c.batch = run.batch, c.stride = s.stride, c.padding = s.padding;
  c.bias = parameters, c.scale = parameters + c.out.pitch, c.shift = parameters + 2 * c.out.pitch;
  c.relu = s.relu, c.raw = s.groups > 0;
  // Enough tasks to share; where panels alone are enough, each weight is read by one thread.
  const int groups = (c.panels + kernels.panels - 1) / kernels.panels;
  const int blocks = (c.batch * c.out.height * c.out.width + kernels.rows - 1) / kernels.rows;
  c.ranges = std::max(1, std::min(blocks, (4 * team.size() + groups - 1) / groups));
  team.share_stealing(thread, 0, conv2d_tasks(kernels, c),
                      [&](int64_t begin, int64_t end) { kernels.conv(c, begin, end); });
  team.barrier();
  if (!c.raw) return;
  GroupNorm2d n = {c.out,   c.residual, c.scale,     c.shift, static_cast<float>(run.constants[i]),
                   c.batch, s.groups,   c.out.pitch, s.relu,  run.scratch};
  n.channels_per_task = std::min(std::lcm(c.out.channels / s.groups, kPanel), c.out.pitch);
  team.share_stealing(thread, 0, group_norm_tasks(n),
                      [&](int64_t begin, int64_t end) { kernels.group_norm(n, begin, end); });
  team.barrier();
}

void average(const EncoderRun& run, const Map& in, int64_t row) {
  const int b = static_cast<int>(row / in.channels), c = static_cast<int>(row % in.channels);
  double sum = 0;
  for (int y = 0; y < in.height; y++)
    for (int x = 0; x < in.width; x++) sum += in.at(b, y, x)[c];
  run.result[row] = static_cast<float>(sum / (static_cast<double>(in.height) * in.width));
}

void spatial_softmax(const EncoderRun& run, const Map& in, double temperature, int64_t row) {
  const int b = static_cast<int>(row / in.channels), c = static_cast<int>(row % in.channels);
  float most = -std::numeric_limits<float>::infinity();
  for (int y = 0; y < in.height; y++)
    for (int x = 0; x < in.width; x++) most = std::max(most, in.at(b, y, x)[c]);
  double total = 0, across = 0, down = 0;
  const auto place = [](int i, int count) { return count < 2 ? -1.0 : -1.0 + 2.0 * i / (count - 1); };
  for (int y = 0; y < in.height; y++)
    for (int x = 0; x < in.width; x++) {
      const double weight = std::exp((double{in.at(b, y, x)[c]} - most) / temperature);
      total += weight, across += weight * place(x, in.width), down += weight * place(y, in.height);
    }
  run.result[2 * row] = static_cast<float>(across / total);
  run.result[2 * row + 1] = static_cast<float>(down / total);
}

void pool(const EncoderRun& run, size_t i, Team& team, int thread) {
  const Step& s = run.network->steps[i];
  const Map &in = run.maps[s.from], &out = run.maps[i + 1];
  const int64_t features = int64_t{run.batch} * in.channels;
  if (s.kind != StepKind::kMaxPool && i + 1 < run.network->steps.size()) return;  // no step reads it
  if (s.kind == StepKind::kMaxPool) {
    const MaxPool2d p = {in, out, run.batch, s.kernel, s.stride, s.padding};
    team.share_stealing(thread, 0, int64_t{run.batch} * out.height,
                        [&](int64_t begin, int64_t end) { run.kernels->images.max_pool(p, begin, end); });
  } else if (s.kind == StepKind::kAveragePool) {
    share_rows(team, thread, features, [&](int64_t row) { average(run, in, row); });
  } else {
    share_rows(team, thread, features, [&](int64_t row) { spatial_softmax(run, in, run.constants[i], row); });
  }
  team.barrier();
}

}  // namespace

bool reads_image_by_convolutions(const Network& network) {
  return std::all_of(network.steps.begin(), network.steps.end(),
                     [](const Step& s) { return (s.from != 0 || s.kind == StepKind::kConv) && s.residual != 0; });
}

size_t encoder_places(const Network& network, DType dtype, std::vector<PackedOffsets>& places) {
  size_t bytes = 0;
  std::vector<int> channels = {network.channels};
  places.clear();
  for (const Step& s : network.steps) {
    const int in = channels[s.from];
    PackedOffsets place;
    if (s.kind == StepKind::kConv) {
      const size_t row = size_t{4} * padded(s.out_channels);
      place.weights = bytes;
      place.parameters = bytes + row * s.kernel * steps_of(s, in, kind_of(dtype, s.from == 0));
      bytes = place.parameters + 3 * row;
    }
    channels.push_back(s.kind == StepKind::kConv ? s.out_channels : in);
    places.push_back(place);
  }
  return bytes;
}

DType packed_dtype(const Step& s, DType dtype) { return s.from == 0 ? DType::kFloat32 : dtype; }

void pack_convolution(const Step& s, int in_channels, DType dtype, const void* weight, const float* const parameters[3],
                      const PackedOffsets& place, void* packed) {
  const bool from_image = s.from == 0;
  const Weights kind = kind_of(dtype, from_image);
  const int bytes = kind == Weights::kFloat32 ? 4 : 2, pitch = pitch_of(in_channels, from_image);
  const int64_t depth = int64_t{s.kernel} * s.kernel * pitch;
  auto* const base = static_cast<char*>(packed);
  const auto* from = static_cast<const char*>(weight);
  const int taps = s.kernel * s.kernel;
  for (int o = 0; o < s.out_channels; o++) {
    char* panel = base + place.weights + o / kPanel * depth * kPanel * bytes;
    for (int c = 0; c < in_channels; c++)
      for (int tap = 0; tap < taps; tap++, from += bytes) {
        // Two 16-bit weights of one output are a word, the first in the low half.
        const int64_t input = int64_t{tap} * pitch + c, pair = 4 / bytes;
        std::memcpy(panel + ((input / pair * kPanel + o % kPanel) * pair + input % pair) * bytes, from, bytes);
      }
  }
  auto* const to = reinterpret_cast<float*>(base + place.parameters);
  for (int k = 0; k < 3; k++)
    if (parameters[k]) std::copy_n(parameters[k], s.out_channels, to + int64_t{k} * padded(s.out_channels));
}

int64_t useful_threads(const EncoderRun& run) {
  int64_t multiply_adds = 0;
  for (size_t i = 0; i < run.network->steps.size(); i++) {
    const Step& s = run.network->steps[i];
    const auto& out = (*run.extents)[i + 1];
    if (s.kind == StepKind::kConv)
      multiply_adds += int64_t{run.batch} * out.height * out.width * s.kernel * s.kernel * out.channels *
                       (*run.extents)[s.from].channels;
  }
  return std::max<int64_t>(1, multiply_adds / 8'000'000);
}

size_t place_maps(EncoderRun& run, void* workspace) {
  const auto& extents = *run.extents;
  size_t bytes = 0;
  int widest = 0;
  run.maps.assign(extents.size(), {});
  for (size_t m = 0; m < extents.size(); m++) {
    Map& map = run.maps[m];
    map.height = extents[m].height, map.width = extents[m].width, map.channels = extents[m].channels;
    map.pitch = pitch_of(map.channels, m == 0);
    for (const Step& s : run.network->steps)
      if (s.from == static_cast<int>(m) && s.kind == StepKind::kConv) map.border = std::max(map.border, s.padding);
    const size_t before = int64_t{map.border} * (map.row() + map.pitch);
    if (workspace) map.data = reinterpret_cast<float*>(static_cast<char*>(workspace) + bytes) + before;
    bytes += (size_t{4} * run.batch * map.sample() + 63) / 64 * 64;
    widest = std::max(widest, map.pitch);
  }
  run.scratch = workspace ? reinterpret_cast<float*>(static_cast<char*>(workspace) + bytes) : nullptr;
  return bytes + size_t{4} * run.batch * 2 * widest;
}

void run_encoder(const EncoderRun& run, Team& team, int thread) {
  for (const Map& map : run.maps)
    share_rows(team, thread, int64_t{run.batch} * (map.height + 2 * map.border),
               [&](int64_t row) { clear_border(map, row); });
  share_rows(team, thread, int64_t{run.batch} * run.maps[0].height, [&](int64_t row) { copy_image(run, row); });
  team.barrier();
  for (size_t i = 0; i < run.network->steps.size(); i++)
    run.network->steps[i].kind == StepKind::kConv ? convolve(run, i, team, thread) : pool(run, i, team, thread);
}

}  // namespace dpa::kernels::cpu
