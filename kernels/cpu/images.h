// The steps of an image encoder, as a level computes them. A feature map is (sample, row, pixel, channel) in float32,
// channels padded to 16 (an image's are not), with a border of zeros as wide as its readers pad: the inputs of an output
// in one row of taps are consecutive numbers, and no tap is a special case.
#pragma once
#include <cstdint>

#include "kernels/cpu/panels.h"

namespace dpa::kernels::cpu {

/// A feature map; `data` is pixel (0, 0) of sample 0, inside the border.
struct Map {
  float* data = nullptr;
  int height = 0, width = 0, channels = 0, pitch = 0, border = 0;  // pitch: floats from pixel to pixel
  int64_t row() const { return int64_t{width + 2 * border} * pitch; }
  int64_t sample() const { return (height + 2 * border) * row(); }
  float* at(int b, int y, int x) const { return data + b * sample() + y * row() + int64_t{x} * pitch; }
};

/// out = relu((conv(in) + bias) * scale + shift + residual); conv(in) + bias alone where `raw`. A task is a group of
/// panels x a range of rows, which are the output's pixels of all samples.
struct Conv2d {
  Weights kind;  // never kBFloat16Dot
  const uint32_t* weights;
  int taps, steps;  // rows of taps; words a panel, row of taps and output
  int panels, batch, stride, padding;
  Map in, out, residual;  // residual.data null for none
  const float *bias, *scale, *shift;
  bool relu, raw;
  int ranges;  // of rows
};

/// out = relu(group_norm(out) * scale + shift + residual), in place. A task is whole groups of one sample.
struct GroupNorm2d {
  Map out, residual;
  const float *scale, *shift;
  float eps;
  int batch, groups, channels_per_task;
  bool relu;
  float* scratch;  // (batch, 2, pitch)
};

/// The maximum over a window, clipped to the map. A task is a row of the output.
struct MaxPool2d {
  Map in, out;
  int batch, kernel, stride, padding;
};

struct ImageKernels {
  int panels, rows;  // of a register block
  void (*conv)(const Conv2d& conv, int64_t begin, int64_t end);
  void (*group_norm)(const GroupNorm2d& norm, int64_t begin, int64_t end);
  void (*max_pool)(const MaxPool2d& pool, int64_t begin, int64_t end);
};
inline int64_t conv2d_tasks(const ImageKernels& k, const Conv2d& c) {
  return int64_t{c.ranges} * ((c.panels + k.panels - 1) / k.panels);
}
inline int64_t group_norm_tasks(const GroupNorm2d& n) {
  return int64_t{n.batch} * ((n.out.channels + n.channels_per_task - 1) / n.channels_per_task);
}

}  // namespace dpa::kernels::cpu
