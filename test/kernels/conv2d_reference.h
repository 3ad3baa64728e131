// Image encoders' layers in double precision, and the lists of layers of ResNets.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/plans/conv2d/plan.h"

namespace dpa::test {

using kernels::DType;
using kernels::conv2d::Shape;

// The value that is stored for x.
inline float rounded(DType dtype, float x) {
  if (dtype == DType::kFloat32 || !std::isfinite(x)) return x;
  if (dtype == DType::kFloat16) return static_cast<float>(static_cast<_Float16>(x));
  uint32_t u;
  std::memcpy(&u, &x, 4);
  u = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&x, &u, 4);
  return x;
}
// What the tensor cores take of it.
inline float multiplied(DType dtype, float x) {
  if (dtype != DType::kFloat32) return rounded(dtype, x);
  uint32_t u;
  std::memcpy(&u, &x, 4);
  u = (u + 0x1000) & 0xffffe000u;
  std::memcpy(&x, &u, 4);
  return x;
}
inline void store_value(DType dtype, void* to, int64_t i, float x) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(to)[i] = x;
  } else if (dtype == DType::kFloat16) {
    static_cast<_Float16*>(to)[i] = static_cast<_Float16>(x);
  } else {
    const float r = rounded(dtype, x);
    uint32_t u;
    std::memcpy(&u, &r, 4);
    static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(u >> 16);
  }
}
inline float load_value(DType dtype, const void* from, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(from)[i];
  if (dtype == DType::kFloat16) return static_cast<float>(static_cast<const _Float16*>(from)[i]);
  const uint32_t u = uint32_t{static_cast<const uint16_t*>(from)[i]} << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// A dense image (batch, height, width, channels).
struct Image {
  int batch = 0, height = 0, width = 0, channels = 0;
  std::vector<double> values;
  Image() = default;
  Image(int n, int h, int w, int c)
      : batch(n), height(h), width(w), channels(c), values(static_cast<size_t>(n) * h * w * c) {}
  double& at(int n, int y, int x, int c) {
    return values[((static_cast<size_t>(n) * height + y) * width + x) * channels + c];
  }
  double at(int n, int y, int x, int c) const { return const_cast<Image*>(this)->at(n, y, x, c); }
};

struct Layer {
  Shape shape;
  std::vector<float> weights, bias, scale, shift;  // empty: none
  bool relu = false;
  float eps = 1e-5f;
};

inline Image convolve(const Layer& l, const Image& x, const Image* residual) {
  const Shape& s = l.shape;
  Image y(s.batch, s.out_height, s.out_width, s.out_channels);
  for (int n = 0; n < s.batch; n++)
    for (int p = 0; p < s.out_height; p++)
      for (int q = 0; q < s.out_width; q++)
        for (int k = 0; k < s.out_channels; k++) {
          double sum = l.bias.empty() ? 0 : l.bias[k];
          for (int r = 0; r < s.kernel_height; r++)
            for (int t = 0; t < s.kernel_width; t++) {
              const int h = p * s.stride - s.pad_top + r, w = q * s.stride - s.pad_left + t;
              if (h < 0 || w < 0 || h >= s.height || w >= s.width) continue;
              for (int c = 0; c < s.channels; c++)
                sum +=
                    x.at(n, h, w, c) *
                    l.weights[((static_cast<size_t>(k) * s.channels + c) * s.kernel_height + r) * s.kernel_width + t];
            }
          y.at(n, p, q, k) = sum;
        }
  const int groups = s.groups, width = groups ? s.out_channels / groups : 1;
  for (int n = 0; groups && n < s.batch; n++)
    for (int g = 0; g < groups; g++) {
      double mean = 0, squares = 0;
      const double count = static_cast<double>(s.out_height) * s.out_width * width;
      const auto each = [&](auto&& f) {
        for (int p = 0; p < s.out_height; p++)
          for (int q = 0; q < s.out_width; q++)
            for (int k = g * width; k < (g + 1) * width; k++) f(y.at(n, p, q, k));
      };
      each([&](double& v) { mean += v / count; });
      each([&](double& v) { squares += (v - mean) * (v - mean) / count; });
      each([&](double& v) { v = (v - mean) / std::sqrt(squares + l.eps); });
    }
  for (size_t i = 0; i < y.values.size(); i++) {
    const size_t k = i % s.out_channels;
    double& v = y.values[i];
    v = v * (l.scale.empty() ? 1.0 : l.scale[k]) + (l.shift.empty() ? 0.0 : l.shift[k]);
    if (residual) v += residual->values[i];
    if (l.relu && v < 0) v = 0;
  }
  return y;
}

}  // namespace dpa::test
