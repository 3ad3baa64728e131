// On the CPU a task is one row of the output. The rows of the image that reach into it are added up into one row,
// which is then resized along its width, normalised and written channels-last. What the crop leaves out is not read.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/common/convert.h"
#include "ops/common/strides.h"
#include "ops/resize_crop_normalize/resize_crop_normalize.h"

namespace dpa {
namespace {

/// Which input pixels an output pixel is made of, and how much of each.
struct Window {
  int64_t first;
  std::vector<double> weights;
};

/// The windows of output pixels [start, start + count) of a bilinear resize from `from` to `to` pixels: a triangle
/// around the pixel's centre, as wide as the pixel where that shrinks and `antialias` is set, as in torchvision.
std::vector<Window> windows_along(int64_t from, int64_t to, int64_t start, int64_t count, bool antialias) {
  std::vector<Window> all;
  const double ratio = static_cast<double>(from) / static_cast<double>(to);
  const double support = antialias ? std::max(ratio, 1.0) : 1.0;
  for (int64_t i = start; i < start + count; ++i) {
    if (from == to) {
      all.push_back({i, {1.0}});
      continue;
    }
    // Beyond the border the border's pixel counts.
    const double limit = static_cast<double>(from) - 0.5;
    const double centre = std::clamp(ratio * (static_cast<double>(i) + 0.5), antialias ? 0.0 : 0.5,
                                     antialias ? static_cast<double>(from) : limit);
    const auto first = std::max<int64_t>(static_cast<int64_t>(centre - support + 0.5), 0);
    const auto last = std::min<int64_t>(static_cast<int64_t>(centre + support + 0.5), from);
    Window window{first, {}};
    double sum = 0;
    for (int64_t j = first; j < last; ++j) {
      const double distance = std::abs(static_cast<double>(j) + 0.5 - centre) / support;
      window.weights.push_back(std::max(0.0, 1 - distance));
      sum += window.weights.back();
    }
    for (auto& weight : window.weights) weight /= sum;
    all.push_back(std::move(window));
  }
  return all;
}

/// One call; `row` and `pixel` are strides of the image, which counts in its own elements.
template <class T, class A>
struct Pass {
  const T* image;
  int64_t sample, channel, row, pixel, channels;
  std::vector<Window> rows, columns;
  std::vector<A> mean, std;
  A* out;

  /// The columns of the image that the crop needs, [begin, end).
  int64_t begin() const { return columns.front().first; }
  int64_t end() const { return columns.back().first + static_cast<int64_t>(columns.back().weights.size()); }

  void add_rows(int64_t b, const Window& window, A* sum) const {
    const int64_t from = begin(), count = end() - from;
    std::fill(sum, sum + count * channels, A(0));
    for (size_t i = 0; i < window.weights.size(); ++i) {
      const auto weight = static_cast<A>(window.weights[i] * (std::is_same_v<T, uint8_t> ? 1.0 / 255 : 1.0));
      const T* const line = image + b * sample + (window.first + static_cast<int64_t>(i)) * row + from * pixel;
      if (channel == 1 && pixel == channels) {
        for (int64_t j = 0; j < count * channels; ++j) sum[j] += weight * static_cast<A>(widen(line[j]));
      } else {
        for (int64_t c = 0; c < channels; ++c)
          for (int64_t j = 0; j < count; ++j)
            sum[j * channels + c] += weight * static_cast<A>(widen(line[c * channel + j * pixel]));
      }
    }
  }

  void operator()(int64_t task, A* sum) const {
    const auto height = static_cast<int64_t>(rows.size());
    add_rows(task / height, rows[task % height], sum);
    A* to = out + task * static_cast<int64_t>(columns.size()) * channels;
    for (const auto& column : columns)
      for (int64_t c = 0; c < channels; ++c) {
        A value = 0;
        for (size_t j = 0; j < column.weights.size(); ++j)
          value += static_cast<A>(column.weights[j]) *
                   sum[(column.first - begin() + static_cast<int64_t>(j)) * channels + c];
        *to++ = (value - mean[c]) / std[c];
      }
  }
};

template <class A>
std::vector<A> each_channel(const OptionalTensor& given, int64_t channels, A otherwise) {
  std::vector<A> values(channels, otherwise);
  if (!given.has_value()) return values;
  const auto wide = given->to(c10::CppTypeToScalarType<A>::value).contiguous();
  std::copy_n(wide.template const_data_ptr<A>(), channels, values.begin());
  return values;
}

template <class T, class A>
void run(const Tensor& image, const ImageSizes& s, const OptionalTensor& mean, const OptionalTensor& std,
         bool antialias, bool hwc, const Tensor& out) {
  const auto at = [](const c10::SymInt& size) { return size.expect_int(); };
  const int64_t channels = at(s.channels);
  const int c = hwc ? 3 : 1, h = hwc ? 1 : 2;
  Pass<T, A> pass{image.const_data_ptr<T>(),
                  image.stride(0),
                  image.stride(c),
                  image.stride(h),
                  image.stride(h + 1),
                  channels,
                  windows_along(at(s.height), at(s.resized_height), at(s.top), at(s.out_height), antialias),
                  windows_along(at(s.width), at(s.resized_width), at(s.left), at(s.out_width), antialias),
                  each_channel<A>(mean, channels, A(0)),
                  each_channel<A>(std, channels, A(1)),
                  out.mutable_data_ptr<A>()};
  const int64_t tasks = at(s.batch) * at(s.out_height), width = pass.end() - pass.begin();
  at::parallel_for(0, tasks, std::max<int64_t>(1, (1 << 14) / (width * channels)), [&](int64_t begin, int64_t end) {
    std::vector<A> sum(width * channels);
    for (int64_t task = begin; task < end; ++task) pass(task, sum.data());
  });
}

Tensor resize_crop_normalize_cpu(const Tensor& image, at::OptionalSymIntArrayRef size, at::OptionalSymIntArrayRef crop,
                                 const OptionalTensor& mean, const OptionalTensor& std, bool antialias, bool hwc,
                                 std::optional<at::ScalarType> dtype) {
  const auto s = check_resize_crop_normalize(image, size, crop, mean, std, hwc, dtype);
  const auto type = image_type(image, dtype);
  const bool wide = type == at::kDouble || image.scalar_type() == at::kDouble;
  const auto out = empty_image(s.batch, s.channels, s.out_height, s.out_width, /*channels_last=*/true,
                               image.options().dtype(wide ? at::kDouble : at::kFloat));
  if (out.numel() > 0)
    AT_DISPATCH_FLOATING_TYPES_AND3(at::kHalf, at::kBFloat16, at::kByte, image.scalar_type(), "resize_crop_normalize",
                                    [&] {
                                      if (wide)
                                        run<scalar_t, double>(image, s, mean, std, antialias, hwc, out);
                                      else
                                        run<scalar_t, float>(image, s, mean, std, antialias, hwc, out);
                                    });
  return image_in_order(out.to(type), true);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) { m.impl("resize_crop_normalize", &resize_crop_normalize_cpu); }

}  // namespace dpa
