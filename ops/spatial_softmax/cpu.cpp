// On the CPU a task is one feature map, read twice: for its largest value, then for the sums.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "ops/spatial_softmax/spatial_softmax.h"

namespace dpa {
namespace {

constexpr int64_t kPixelsPerThread = 1 << 14;  // pixels worth a thread

/// The coordinate of pixel `i` of `n`, from -1 to 1; one pixel is at -1, as in torch.linspace.
template <class T>
T coordinate(int64_t i, int64_t n) {
  return n > 1 ? T(-1) + T(2) * static_cast<T>(i) / static_cast<T>(n - 1) : T(-1);
}

template <class T>
void keypoint(const T* map, int64_t height, int64_t width, T temperature, T* out) {
  // NaN wins, as in a softmax.
  T most = map[0] / temperature;
  for (int64_t i = 1; i < height * width; ++i) {
    const T value = map[i] / temperature;
    most = value > most || std::isnan(value) ? value : most;
  }
  T sum = 0, x = 0, y = 0;
  for (int64_t row = 0; row < height; ++row) {
    T of_row = 0;
    for (int64_t column = 0; column < width; ++column) {
      const T weight = std::exp(map[row * width + column] / temperature - most);
      of_row += weight;
      x += weight * coordinate<T>(column, width);
    }
    sum += of_row;
    y += of_row * coordinate<T>(row, height);
  }
  out[0] = x / sum;
  out[1] = y / sum;
}

Tensor spatial_softmax_cpu(const Tensor& input, const OptionalTensor& temperature) {
  check_spatial_softmax(input, temperature);
  const auto type = accumulate_type(input.scalar_type());
  const auto maps = input.to(type).contiguous();
  const int64_t height = maps.size(2), width = maps.size(3);
  const auto out = at::empty({maps.size(0), maps.size(1), 2}, maps.options());
  AT_DISPATCH_FLOATING_TYPES(type, "spatial_softmax", [&] {
    const auto* const from = maps.const_data_ptr<scalar_t>();
    auto* const to = out.mutable_data_ptr<scalar_t>();
    const auto divisor = temperature.has_value() ? temperature->item<scalar_t>() : scalar_t(1);
    const int64_t count = maps.size(0) * maps.size(1), pixels = height * width;
    at::parallel_for(0, count, std::max<int64_t>(1, kPixelsPerThread / pixels), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) keypoint(from + i * pixels, height, width, divisor, to + 2 * i);
    });
  });
  return out.to(input.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) { m.impl("spatial_softmax", &spatial_softmax_cpu); }

}  // namespace dpa
