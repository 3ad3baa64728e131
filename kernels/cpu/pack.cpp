// Packing on the CPU.
//
//   copies   vectors, FiLM's and the time embedding's weights, as the plan lists them: a task each
//   panels   the convolutions' weights, 16 output channels a panel: panel p, step s, output o is the word
//            weights[(p * steps + s) * 16 + o]: the weight of input s, or two 16-bit ones, of inputs 2 s and 2 s + 1,
//            the first in the low half. Inputs are numbered (tap, channel), with the channels of the value and of the
//            skip each padded to multiples of 16 by zeros: a task each panel.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/cpu/unet1d.h"

namespace dpa::kernels::cpu {
namespace {

/// Behind the weights: who packed them, and everything that their order and their number follow from.
struct Stamp {
  char text[64] = "dpa: packed for the CPU, panels of 16";
  int32_t numbers[16] = {};

  explicit Stamp(const Plan& plan) {
    const auto& c = plan.config;
    int32_t* to = numbers;
    for (const int number : {static_cast<int>(plan.dtype), c.action_dim, c.kernel_size, c.num_groups, c.step_dim,
                             c.cond_dim, c.flags(), c.levels})
      *to++ = number;
    std::copy_n(c.down_dims, c.levels, to);
  }
};
static_assert(sizeof(Stamp) == unet1d::kStampBytes, "the plan keeps this place for it");

// Biases as they differ from their mean over a group.
void copy_beside_groups(const unet1d::CopyItem& item, const float* from, char* to) {
  const int width = item.n[0] / item.groups;
  std::vector<float> values(from, from + item.n[0]);
  for (auto group = values.begin(); group != values.end(); group += width) {
    const float mean = std::accumulate(group, group + item.counted, 0.0f) / static_cast<float>(item.counted);
    for (int c = 0; c < item.counted; c++) group[c] -= mean;
  }
  std::memcpy(to, values.data(), values.size() * 4);
}

void copy(const Plan& plan, const unet1d::CopyItem& item, const Sources& sources, char* packed) {
  constexpr int kIdentity = -2;
  if (item.groups > 0) return copy_beside_groups(item, sources.floats[item.weight], packed + item.destination);
  const bool wide = item.to_float || plan.dtype == DType::kFloat32;
  char* to = packed + item.destination;
  for (int i = 0; i < item.n[0]; i++) {
    for (int j = 0; j < item.n[1]; j++) {
      for (int l = 0; l < item.n[2]; l++) {
        const int64_t from = item.offset + i * item.stride[0] + j * item.stride[1] + l * item.stride[2];
        if (item.weight < 0) {
          const float value = item.weight == kIdentity && i == j ? 1.0f : 0.0f;
          std::memcpy(to, &value, 4);
        } else if (item.to_float) {
          std::memcpy(to, sources.floats[item.weight] + from, 4);
        } else {
          const int bytes = wide ? 4 : 2;
          std::memcpy(to, static_cast<const char*>(sources.typed[item.weight]) + from * bytes, bytes);
        }
        to += wide ? 4 : 2;
      }
    }
  }
}

/// The weight (output o, tap, padded input channel c) of a segment, in the plan's type, as the low bits of a word.
struct PanelSource {
  const unet1d::TileItem& item;
  const unet1d::Conv& conv;
  const void* data;
  DType dtype;

  uint32_t one() const { return dtype == DType::kFloat32 ? 0x3f800000 : dtype == DType::kBFloat16 ? 0x3f80 : 0x3c00; }
  uint32_t operator()(int o, int tap, int c) const {
    const int own = padded(conv.channels_in);
    int in = c;
    if (c >= own) in = c - own < conv.channels_skip ? conv.channels_in + c - own : -1;
    if (c < own && c >= conv.channels_in) in = -1;
    if (o >= conv.channels_out || in < 0) return 0;
    if (item.weight < 0) return in == o ? one() : 0;
    const int64_t at =
        o * item.stride_out + in * item.stride_in + (item.tap_first + tap * item.tap_step) * item.stride_tap;
    return dtype == DType::kFloat32 ? static_cast<const uint32_t*>(data)[at] : static_cast<const uint16_t*>(data)[at];
  }
};

void pack_panel(const Plan& plan, const unet1d::TileItem& item, const Sources& sources, int panel, char* packed) {
  const unet1d::Conv& conv = plan.convs[item.conv];
  const unet1d::Segment& segment = conv.segments[item.segment];
  const int pitch = padded(conv.channels_in) + padded(conv.channels_skip);
  const int inputs = plan.dtype == DType::kFloat32 ? 1 : 2;
  const int64_t steps = static_cast<int64_t>(segment.taps) * pitch / inputs;
  const PanelSource source = {item, conv, item.weight < 0 ? nullptr : sources.typed[item.weight], plan.dtype};
  auto* to = reinterpret_cast<uint32_t*>(packed + segment.weights) + panel * steps * kPanel;
  for (int o = 0; o < kPanel; o++) {
    for (int tap = 0; tap < segment.taps; tap++) {
      for (int c = 0; c < pitch; c += inputs) {
        const int64_t s = (static_cast<int64_t>(tap) * pitch + c) / inputs;
        uint32_t word = source(panel * kPanel + o, tap, c);
        if (inputs == 2) word |= source(panel * kPanel + o, tap, c + 1) << 16;
        to[s * kPanel + o] = word;
      }
    }
  }
}

int panels(const Plan& plan, const unet1d::TileItem& item) {
  return padded(plan.convs[item.conv].channels_out) / kPanel;
}

}  // namespace

Sources pack_sources(const Plan& plan) {
  const size_t count = plan.weights.size();
  Sources sources = {std::vector<bool>(count), std::vector<bool>(count), std::vector<const float*>(count),
                     std::vector<const void*>(count)};
  for (const auto& item : plan.copies)
    if (item.weight >= 0) (item.to_float ? sources.needs_float : sources.needs_typed)[item.weight] = true;
  for (const auto& item : plan.tiles)
    if (item.weight >= 0) sources.needs_typed[item.weight] = true;
  return sources;
}

int64_t pack_tasks(const Plan& plan) {
  int64_t tasks = 1 + static_cast<int64_t>(plan.copies.size());
  for (const auto& item : plan.tiles) tasks += panels(plan, item);
  return tasks;
}

void pack(const Plan& plan, const Sources& sources, void* packed_, int64_t begin, int64_t end) {
  char* packed = static_cast<char*>(packed_);
  const int64_t copies = static_cast<int64_t>(plan.copies.size());
  for (int64_t task = begin; task < end; task++) {
    if (task < copies) {
      copy(plan, plan.copies[task], sources, packed);
    } else if (task == copies) {
      const Stamp stamp(plan);
      std::memcpy(packed + plan.stamp, &stamp, sizeof stamp);
    } else {
      int64_t panel = task - copies - 1;
      size_t item = 0;
      while (panel >= panels(plan, plan.tiles[item])) panel -= panels(plan, plan.tiles[item++]);
      pack_panel(plan, plan.tiles[item], sources, static_cast<int>(panel), packed);
    }
  }
}

bool packed_here(const Plan& plan, const void* packed) {
  const Stamp stamp(plan);
  return std::memcmp(static_cast<const char*>(packed) + plan.stamp, &stamp, sizeof stamp) == 0;
}

}  // namespace dpa::kernels::cpu
