// From a camera's image to the encoder's input in one pass: resize (bilinear), crop, normalise, channels last.
#pragma once
#include "kernels/cuda/conv2d/conv2d.h"
#include "kernels/cuda/conv2d/device.cuh"

namespace dpa::kernels::conv2d::device {

// The pixels that a pixel of the resized image is made of, along one side, and their weights: with antialias a triangle as
// wide as the scale, else the two neighbours. Weights are divided by their sum.
struct Taps {
  int first, count;
  float centre, inverse_scale, factor;
  DPA_DEVICE Taps(int at, int size, int resized, bool antialias) {
    if (size == resized) {  // the other side is resized: no tap of weight zero is loaded
      first = at, count = 1, centre = static_cast<float>(at) + 0.5f, inverse_scale = factor = 1.0f;
      return;
    }
    const float scale = static_cast<float>(size) / static_cast<float>(resized);
    if (antialias) {
      const float support = scale > 1.0f ? scale : 1.0f;
      centre = scale * (static_cast<float>(at) + 0.5f);
      inverse_scale = scale > 1.0f ? 1.0f / scale : 1.0f;
      first = max(static_cast<int>(centre - support + 0.5f), 0);
      count = min(static_cast<int>(centre + support + 0.5f), size) - first;
    } else {
      centre = max(scale * (static_cast<float>(at) + 0.5f), 0.5f);
      inverse_scale = 1.0f;
      first = min(static_cast<int>(centre - 0.5f), size - 1);
      count = min(2, size - first);
    }
    factor = 1.0f;
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < count; i++) sum += (*this)(i);
    factor = 1.0f / sum;
  }
  DPA_DEVICE float operator()(int i) const {
    const float x = (static_cast<float>(i + first) - centre + 0.5f) * inverse_scale;
    return max(0.0f, 1.0f - (x < 0.0f ? -x : x)) * factor;
  }
};

template <class S>
DPA_DEVICE float value_of(const S& x) {
  if constexpr (sizeof(S) == 1)
    return static_cast<float>(x) / 255.0f;
  else if constexpr (sizeof(S) == 4)
    return x;
  else
    return unpack(BFloat16{}, x).x;
}

// All channels of a pixel that lies at `at`, normalised.
template <class S, int kChannels>
DPA_DEVICE void pixel_at(const Preprocess& p, const S* at, float (&to)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; c++)
    to[c] = kChannels == 3 || c < p.channels ? (value_of(at[c * p.stride_c]) - p.mean[c]) * p.inverse_std[c] : 0.0f;
}
template <class S>
DPA_DEVICE const S* place_of(const Preprocess& p, int n, int y, int x) {
  return static_cast<const S*>(p.image) + n * p.stride_n + (y + p.top) * p.stride_y + (x + p.left) * p.stride_x;
}

// All channels of a pixel of the resized, cropped, normalised image.
template <class S, int kChannels>
DPA_DEVICE void resized_pixel(const Preprocess& p, int n, int y, int x, float (&to)[kChannels]) {
  const S* base = static_cast<const S*>(p.image) + n * p.stride_n;
  const Taps rows(y + p.top, p.height, p.resized_height, p.antialias),
      columns(x + p.left, p.width, p.resized_width, p.antialias);
#pragma unroll
  for (int c = 0; c < kChannels; c++) to[c] = 0.0f;
#pragma unroll 1
  for (int i = 0; i < rows.count; i++) {
    float line[kChannels] = {};
#pragma unroll 1
    for (int j = 0; j < columns.count; j++) {
      const S* at = base + (rows.first + i) * p.stride_y + (columns.first + j) * p.stride_x;
      const float w = columns(j);
#pragma unroll
      for (int c = 0; c < kChannels; c++)
        if (c < p.channels) line[c] += w * value_of(at[c * p.stride_c]);
    }
    const float w = rows(i);
#pragma unroll
    for (int c = 0; c < kChannels; c++) to[c] += w * line[c];
  }
#pragma unroll
  for (int c = 0; c < kChannels; c++) to[c] = c < p.channels ? (to[c] - p.mean[c]) * p.inverse_std[c] : 0.0f;
}

// A thread: pieces `first`, `first` + `step`, ... of the messages.
DPA_DEVICE void zero_messages(const Preprocesses& a, int64_t first, int64_t step) {
#pragma unroll 1
  for (int64_t i = first; i < a.message_pieces; i += step) store_16(static_cast<uint4*>(a.messages) + i, uint4{});
}

// A thread: a pixel of the output, or a cell of 2 x 2 pixels (12 channels, in rows of pixels), for a 7 x 7 filter of
// stride 2 as one of 4 x 4. What of a cell lies outside is zero, as padding is. Where nothing is resized, the loads of a
// cell do not wait for one another: outside they are of a pixel inside.
template <class T, class S, bool kResized>
DPA_DEVICE void preprocess(const Preprocess& p) {
  const int side = p.cells ? 2 : 1, height = (p.crop_height + side - 1) / side,
            width = (p.crop_width + side - 1) / side;
#pragma unroll 1
  for (int i = block() * kThreads + thread(); i < p.batch * height * width; i += blocks() * kThreads) {
    const int n = i / (height * width), rest = i - n * height * width, y = rest / width, x = rest - y * width;
    uint4* to = static_cast<uint4*>(p.out);
    if (!p.cells) {
      float value[4], padded[T::kElements] = {};
      if constexpr (kResized)
        resized_pixel<S>(p, n, y, x, value);
      else
        pixel_at(p, place_of<S>(p, n, y, x), value);
#pragma unroll
      for (int c = 0; c < 4; c++) padded[c] = value[c];
      store_16(to + i, narrow<T>(padded));
      continue;
    }
    const bool below = 2 * y + 1 < p.crop_height, right = 2 * x + 1 < p.crop_width;
    float cell[16] = {};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float value[3];
      const bool inside = (k < 2 || below) && (k % 2 == 0 || right);
      if constexpr (kResized) {
        if (!inside) continue;
        resized_pixel<S>(p, n, 2 * y + k / 2, 2 * x + k % 2, value);
      } else {
        const int64_t down = k >= 2 && below ? p.stride_y : 0, across = k % 2 && right ? p.stride_x : 0;
        pixel_at(p, place_of<S>(p, n, 2 * y, 2 * x) + down + across, value);
      }
#pragma unroll
      for (int c = 0; c < 3; c++) cell[3 * k + c] = inside ? value[c] : 0.0f;
    }
    constexpr int kPieces = (12 + T::kElements - 1) / T::kElements;
#pragma unroll
    for (int k = 0; k < kPieces; k++) {
      float piece[T::kElements];
#pragma unroll
      for (int e = 0; e < T::kElements; e++) piece[e] = cell[k * T::kElements + e];
      store_16(to + int64_t{i} * kPieces + k, narrow<T>(piece));
    }
  }
}

}  // namespace dpa::kernels::conv2d::device
