// The steps of an image encoder at a level.
//
//   conv       registers hold the sums of kPixels pixels x kWide panels over all of the depth; the loop over pixels is
//              inside, so weights come from memory once and then from L2
//   group_norm three passes over whole groups: sums of each channel, a row of pixels at a time; squares; values
#pragma once
#include <cmath>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/kernels.h"

namespace dpa::kernels::cpu::DPA_LEVEL {

constexpr int kWide = kLanes == 16 ? 2 : 1;
constexpr int kPixels = kLanes == 16 ? 9 : DPA_SUMS * 3 / 2 / kVectors;

/// What the pixels of a register block read and write.
template <int R>
struct Pixels {
  const float* in[R];
  float* out[R];
  const float* residual[R];
};

template <int R>
DPA_INLINE void find_pixels(const Conv2d& c, int row, int channel, Pixels<R>& p) {
  const int extent = c.out.height * c.out.width;
  for (int r = 0; r < R; r++) {
    const int b = (row + r) / extent, y = (row + r) % extent / c.out.width, x = (row + r) % c.out.width;
    p.in[r] = c.in.at(b, y * c.stride - c.padding, x * c.stride - c.padding);
    p.out[r] = c.out.at(b, y, x) + channel;
    p.residual[r] = c.residual.data ? c.residual.at(b, y, x) + channel : nullptr;
  }
}

template <Weights kKind, int R, int P, bool kFetch>
void conv_block(const Conv2d& c, int row, int panel) {
  const int channel = panel * kPanel;
  const int64_t words = int64_t{c.taps} * c.steps * kPanel;
  const uint32_t* weights = c.weights + panel * words;
  Pixels<R> pixels;
  find_pixels(c, row, channel, pixels);
  Floats sums[R][P * kVectors] = {};
  for (int tap = 0; tap < c.taps; tap++, weights += int64_t{c.steps} * kPanel) {
    const void* rows[R];
    for (int r = 0; r < R; r++) rows[r] = pixels.in[r] + tap * c.in.row();
    for (int s = 0; s < c.steps; s++) {
      if constexpr (kFetch) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) __builtin_prefetch(weights + p * words + s * kPanel + kAhead);
      }
      step<kKind, R, P>(sums, rows, weights, words, s);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < P * kVectors; v++) {
    const int at = v * kLanes;
    const Floats bias = load(c.bias + channel + at), scale = load(c.scale + channel + at),
                 shift = load(c.shift + channel + at);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      Floats value = sums[r][v] + bias;
      if (!c.raw) {
        value = value * scale + shift;
        if (c.residual.data) value += load(pixels.residual[r] + at);
        if (c.relu) value = rectified(value);
      }
      store(pixels.out[r] + at, value);
    }
  }
}

template <Weights kKind, int P, bool kFetch>
int conv_pixels(const Conv2d& c, int row, int left, int panel) {
  if (left >= kPixels) return conv_block<kKind, kPixels, P, kFetch>(c, row, panel), kPixels;
  if constexpr (kPixels > 4) {
    if (left >= 4) return conv_block<kKind, 4, P, kFetch>(c, row, panel), 4;
  }
  if constexpr (kPixels > 2) {
    if (left >= 2) return conv_block<kKind, 2, P, kFetch>(c, row, panel), 2;
  }
  return conv_block<kKind, 1, P, kFetch>(c, row, panel), 1;
}

template <Weights kKind, int P>
void conv_task(const Conv2d& c, int panel, int begin, int end) {
  for (int row = begin; row < end;)
    row += row == begin ? conv_pixels<kKind, P, true>(c, row, end - row, panel)
                        : conv_pixels<kKind, P, false>(c, row, end - row, panel);
}

template <Weights kKind>
void conv_of(const Conv2d& c, int64_t begin, int64_t end) {
  const int rows = c.batch * c.out.height * c.out.width;
  const int blocks = (rows + kPixels - 1) / kPixels;
  for (int64_t task = begin; task < end; task++) {
    const int panel = static_cast<int>(task / c.ranges) * kWide;
    const int64_t range = task % c.ranges;
    const int from = static_cast<int>(blocks * range / c.ranges) * kPixels;
    const int last = static_cast<int>(blocks * (range + 1) / c.ranges) * kPixels, to = last < rows ? last : rows;
    if constexpr (kWide == 2) {
      if (c.panels - panel >= 2) {
        conv_task<kKind, 2>(c, panel, from, to);
        continue;
      }
    }
    conv_task<kKind, 1>(c, panel, from, to);
  }
}

inline void conv2d(const Conv2d& c, int64_t begin, int64_t end) {
  switch (c.kind) {
    case Weights::kFloat32: return conv_of<Weights::kFloat32>(c, begin, end);
    case Weights::kFloat16: return conv_of<Weights::kFloat16>(c, begin, end);
    case Weights::kBFloat16: return conv_of<Weights::kBFloat16>(c, begin, end);
    case Weights::kBFloat16Dot:
    case Weights::kBFloat16AsFloat16:
    case Weights::kBFloat16Tiles: return;
  }
}

/// For channels [begin, end) of a sample: the sum over its pixels of x, or of (x - mean)^2, into `to`.
template <bool kSquares>
DPA_INLINE void sums_over_pixels(const Map& map, int b, int begin, int end, const float* mean, float* to) {
  for (int c = begin; c < end; c += kLanes) {
    const Floats middle = kSquares ? load(mean + c) : Floats{};
    Floats total = {};
    for (int y = 0; y < map.height; y++) {
      const float* from = map.at(b, y, 0) + c;
      Floats of_row = {};
      for (int x = 0; x < map.width; x++, from += map.pitch) {
        const Floats value = load(from) - middle;
        of_row += kSquares ? value * value : value;
      }
      total += of_row;
    }
    store(to + c, total);
  }
}

/// Replaces the channels' numbers by `of(total of the group)`.
template <class F>
DPA_INLINE void each_group(float* numbers, int begin, int end, int width, const F& of) {
  for (int c0 = begin; c0 < end; c0 += width) {
    double total = 0;
    for (int c = c0; c < c0 + width; c++) total += numbers[c];
    const auto value = static_cast<float>(of(total));
    for (int c = c0; c < c0 + width; c++) numbers[c] = value;
  }
}

inline void group_norm2d(const GroupNorm2d& n, int64_t begin, int64_t end) {
  const Map& map = n.out;
  const int tasks = static_cast<int>(group_norm_tasks(n) / n.batch), width = map.channels / n.groups;
  const double count = static_cast<double>(width) * map.height * map.width;
  for (int64_t task = begin; task < end; task++) {
    const int b = static_cast<int>(task / tasks), first = static_cast<int>(task % tasks) * n.channels_per_task;
    const int left = map.channels - first, last = first + (left < n.channels_per_task ? left : n.channels_per_task);
    float *mean = n.scratch + int64_t{b} * 2 * map.pitch, *factor = mean + map.pitch;
    sums_over_pixels<false>(map, b, first, last, nullptr, mean);
    each_group(mean, first, last, width, [&](double sum) { return sum / count; });
    sums_over_pixels<true>(map, b, first, last, mean, factor);
    each_group(factor, first, last, width, [&](double sum) { return 1 / std::sqrt(sum / count + n.eps); });
    for (int c = first; c < last; c += kLanes) {
      const Floats middle = load(mean + c), scale = load(factor + c) * load(n.scale + c), shift = load(n.shift + c);
      for (int y = 0; y < map.height; y++) {
        float* to = map.at(b, y, 0) + c;
        const float* more = n.residual.data ? n.residual.at(b, y, 0) + c : nullptr;
        for (int x = 0; x < map.width; x++, to += map.pitch) {
          Floats value = (load(to) - middle) * scale + shift;
          if (more) value += load(more + int64_t{x} * n.residual.pitch);
          store(to, n.relu ? rectified(value) : value);
        }
      }
    }
  }
}

inline void max_pool2d(const MaxPool2d& p, int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; task++) {
    const int b = static_cast<int>(task / p.out.height), y = static_cast<int>(task % p.out.height);
    const int top = y * p.stride - p.padding, bottom = top + p.kernel;
    for (int x = 0; x < p.out.width; x++) {
      const int left = x * p.stride - p.padding, right = left + p.kernel;
      for (int c = 0; c < p.out.pitch; c += kLanes) {
        Floats most = splat(-__builtin_inff());
        for (int v = top < 0 ? 0 : top; v < bottom && v < p.in.height; v++)
          for (int u = left < 0 ? 0 : left; u < right && u < p.in.width; u++) {
            const Floats value = load(p.in.at(b, v, u) + c);
            most = value > most ? value : value != value ? value : most;  // NaN passes
          }
        store(p.out.at(b, y, x) + c, most);
      }
    }
  }
}

constexpr ImageKernels kImageKernels = {kWide, kPixels, conv2d, group_norm2d, max_pool2d};

}  // namespace dpa::kernels::cpu::DPA_LEVEL
