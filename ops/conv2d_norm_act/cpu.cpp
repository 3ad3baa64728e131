// On the CPU oneDNN convolves, channels-last. What follows is one pass over its output, in place; before it, for
// GroupNorm, one that takes the statistics. 16-bit numbers are widened: nothing is rounded before the end.
//
// A weight in oneDNN's own order (`Tensor.to_mkldnn`, or torch.ops.mkldnn._reorder_convolution_weight for known sizes)
// spares oneDNN reordering it in every call. Bias and residual sum then are the convolution's post-ops; ReLU is not, for
// oneDNN's makes zeros of what is no number.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/relu.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

#include "ops/common/strides.h"
#include "ops/common/vectorize.h"
#include "ops/conv2d_norm_act/conv2d_norm_act.h"

namespace dpa {
namespace {

using Ints = at::IntArrayRef;
using Scalars = c10::List<std::optional<at::Scalar>>;
using Name = std::string_view;
using OptionalName = std::optional<std::string_view>;

/// oneDNN's convolution of a weight in its own order, by itself or with a sum.
constexpr Op<"mkldnn::_convolution_pointwise",
             Tensor(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, Ints padding, Ints stride,
                    Ints dilation, int64_t groups, Name unary, Scalars scalars, OptionalName algorithm)>
    mkldnn_convolution;
constexpr Op<"mkldnn::_convolution_pointwise.binary",
             Tensor(const Tensor& x, const Tensor& other, const Tensor& weight, const OptionalTensor& bias,
                    Ints padding, Ints stride, Ints dilation, int64_t groups, Name binary,
                    std::optional<at::Scalar> alpha, OptionalName unary, Scalars scalars, OptionalName algorithm)>
    mkldnn_convolution_sum;

/// What follows the convolution, of one sample: `y` and `residual` are (pixels, channels).
template <class T>
struct Epilogue {
  const T *scale, *shift, *residual;
  int64_t pixels, channels, groups;
  double eps;
  bool relu;
};

/// Turns GroupNorm into a factor and a summand a channel. `sums` has 2 C elements.
template <class T>
DPA_VECTORIZE void normalisation(const T* y, const Epilogue<T>& e, double* sums, T* factor, T* summand) {
  double *first = sums, *second = sums + e.channels;
  const int64_t width = e.channels / e.groups;
  const double count = static_cast<double>(e.pixels) * width;
  std::fill(sums, sums + 2 * e.channels, 0.0);
  for (int64_t p = 0; p < e.pixels; ++p)
    for (int64_t c = 0; c < e.channels; ++c) first[c] += y[p * e.channels + c];
  for (int64_t g = 0; g < e.groups; ++g) {
    double sum = 0;
    for (int64_t c = g * width; c < (g + 1) * width; ++c) sum += first[c];
    for (int64_t c = g * width; c < (g + 1) * width; ++c) first[c] = sum / count;
  }
  for (int64_t p = 0; p < e.pixels; ++p)
    for (int64_t c = 0; c < e.channels; ++c) {
      const double distance = y[p * e.channels + c] - first[c];
      second[c] += distance * distance;
    }
  for (int64_t g = 0; g < e.groups; ++g) {
    double sum = 0;
    for (int64_t c = g * width; c < (g + 1) * width; ++c) sum += second[c];
    const double rstd = 1 / std::sqrt(sum / count + e.eps);
    for (int64_t c = g * width; c < (g + 1) * width; ++c) {
      const double weight = e.scale ? static_cast<double>(e.scale[c]) : 1.0;
      factor[c] = static_cast<T>(weight * rstd);
      summand[c] = static_cast<T>((e.shift ? static_cast<double>(e.shift[c]) : 0.0) - first[c] * weight * rstd);
    }
  }
}

template <class T>
DPA_VECTORIZE void finish(T* y, const T* residual, const T* factor, const T* summand, int64_t pixels, int64_t channels,
                          bool relu) {
  for (int64_t p = 0; p < pixels; ++p, y += channels) {
    for (int64_t c = 0; c < channels; ++c) y[c] = y[c] * factor[c] + summand[c];
    if (residual) {
      for (int64_t c = 0; c < channels; ++c) y[c] += residual[c];
      residual += channels;
    }
    if (relu)
      for (int64_t c = 0; c < channels; ++c) y[c] = y[c] < 0 ? T(0) : y[c];  // NaN stays
  }
}

template <class T>
void follow(T* y, int64_t batch, const Epilogue<T>& e) {
  const int64_t size = e.pixels * e.channels;
  at::parallel_for(0, batch, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> sums(e.groups > 0 ? 2 * e.channels : 0);
    std::vector<T> factor(e.channels, T(1)), summand(e.channels, T(0));
    if (e.groups == 0 && e.scale) std::copy_n(e.scale, e.channels, factor.data());
    if (e.groups == 0 && e.shift) std::copy_n(e.shift, e.channels, summand.data());
    for (int64_t b = begin; b < end; ++b) {
      if (e.groups > 0) normalisation(y + b * size, e, sums.data(), factor.data(), summand.data());
      finish(y + b * size, e.residual ? e.residual + b * size : nullptr, factor.data(), summand.data(), e.pixels,
             e.channels, e.relu);
    }
  });
}

/// The arguments in the type of the arithmetic, and their copies alive.
struct Wide {
  at::ScalarType type;
  Tensor operator()(const Tensor& tensor) const { return tensor.to(type); }
  OptionalTensor operator()(const OptionalTensor& tensor) const {
    return tensor.has_value() ? OptionalTensor(tensor->to(type).contiguous()) : std::nullopt;
  }
};

/// `y` is channels-last, of the type of the arithmetic, and nobody else's.
void follow_in_place(const Tensor& y, const OptionalTensor& scale, const OptionalTensor& shift,
                     const OptionalTensor& residual, int64_t num_groups, double eps, bool relu) {
  if (y.numel() == 0 || (num_groups == 0 && !scale && !shift && !residual && !relu)) return;
  const auto sum = residual.has_value() ? OptionalTensor(image_in_order(*residual, true)) : std::nullopt;
  AT_DISPATCH_FLOATING_TYPES(y.scalar_type(), "conv2d_norm_act", [&] {
    const auto data = [](const OptionalTensor& t) { return t.has_value() ? t->const_data_ptr<scalar_t>() : nullptr; };
    follow<scalar_t>(y.mutable_data_ptr<scalar_t>(), y.size(0),
                     {data(scale), data(shift), data(sum), y.size(2) * y.size(3), y.size(1), num_groups, eps, relu});
  });
}

Tensor conv2d_norm_act_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual,
                           int64_t num_groups, double eps, int64_t stride, int64_t padding, bool relu) {
  check_conv2d_norm_act(input, weight, bias, scale, shift, residual, num_groups, eps, stride, padding);
  const Wide wide{accumulate_type(input.scalar_type())};
  const auto x = image_in_order(wide(input), true);
  const auto y = image_in_order(at::convolution(x, wide(weight), wide(bias), {stride, stride}, {padding, padding},
                                                {1, 1}, /*transposed=*/false, {0, 0}, 1),
                                true);
  follow_in_place(y, wide(scale), wide(shift), wide(residual), num_groups, eps, relu);
  return image_in_order(y.to(input.scalar_type()), is_channels_last_image(input));
}

/// The weight is in oneDNN's order, float32, and so is the input.
Tensor conv2d_norm_act_mkldnn(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                              const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual,
                              int64_t num_groups, double eps, int64_t stride, int64_t padding, bool relu) {
  constexpr const char* op = "conv2d_norm_act";
  DPA_CHECK(weight.is_mkldnn() && !input.is_mkldnn() && input.scalar_type() == at::kFloat, op,
            "weight in oneDNN's order must come with a strided input in float32", input.layout(), " input in ",
            input.scalar_type());
  check_conv2d_norm_act(input, weight, bias, scale, shift, residual, num_groups, eps, stride, padding);
  const bool plain = num_groups == 0 && !scale.has_value();  // post-ops say all but ReLU
  const int64_t strides[] = {stride, stride}, paddings[] = {padding, padding}, dilations[] = {1, 1};
  const auto x = image_in_order(input, true);
  const auto start = plain && !bias.has_value() ? shift : bias;
  const bool shifted = plain && !bias.has_value();
  Tensor y;
  if (plain && residual.has_value() && (shifted || !shift.has_value())) {
    y = mkldnn_convolution_sum(x, image_in_order(*residual, true), weight, start, paddings, strides, dilations, 1,
                               "add", 1.0, std::nullopt, Scalars(), "");
    if (relu) at::relu_(y);
    return image_in_order(y, is_channels_last_image(input));
  }
  y = mkldnn_convolution(x, weight, start, paddings, strides, dilations, 1, "none", Scalars(), "");
  if (!plain || (shift.has_value() && !shifted)) {
    y = image_in_order(y, true);
    follow_in_place(y, scale, shift, residual, num_groups, eps, relu);
  } else if (relu) {
    at::relu_(y);
  }
  return image_in_order(y, is_channels_last_image(input));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) { m.impl("conv2d_norm_act", &conv2d_norm_act_cpu); }
TORCH_LIBRARY_IMPL(dpa, MkldnnCPU, m) { m.impl("conv2d_norm_act", &conv2d_norm_act_mkldnn); }

}  // namespace dpa
