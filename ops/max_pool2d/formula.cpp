// `dpa::max_pool2d` and its backward in ATen ops: what forward-mode AD and second derivatives differentiate, and what
// runs wherever no kernel of the library does. ATen numbers a maximum by its pixel in the image, the library by its
// pixel in the window.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool2d_with_indices_backward.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "ops/common/strides.h"
#include "ops/max_pool2d/max_pool2d.h"

namespace dpa {
namespace {

/// The pixel at which each window begins, padding included, along `size` windows.
Tensor beginnings(const c10::SymInt& size, int64_t stride, int64_t padding, const at::TensorOptions& options) {
  return at::arange(size, options.dtype(at::kLong)) * stride - padding;
}

/// Empty images, of which ATen takes not all.
bool is_empty(const Tensor& image) { return image.sym_numel() == 0; }

/// The number of each maximum's pixel; -1 for a tap outside of its window or of the image, which no forward gives and
/// which passes no gradient on.
Tensor pixels_of(const Tensor& taps, const Tensor& input, int64_t kernel_size, int64_t stride, int64_t padding) {
  const auto height = input.sym_size(2), width = input.sym_size(3);
  const auto tap = taps.to(at::kLong), dy = tap.div(kernel_size, "floor");
  const auto y = dy + beginnings(taps.sym_size(2), stride, padding, taps.options()).unsqueeze(-1);
  const auto x = tap - dy * kernel_size + beginnings(taps.sym_size(3), stride, padding, taps.options());
  const auto inside = (tap < kernel_size * kernel_size)
                          .logical_and((y >= 0).logical_and(y < height))
                          .logical_and((x >= 0).logical_and(x < width));
  return at::where(inside, y * width + x, -1);
}

}  // namespace

MaxPool2dOutputs max_pool2d_forward_formula(const Tensor& input, int64_t kernel_size, int64_t stride, int64_t padding) {
  check_max_pool2d(input, kernel_size, stride, padding);
  const auto height = windows(input.sym_size(2), kernel_size, stride, padding);
  const auto width = windows(input.sym_size(3), kernel_size, stride, padding), columns = input.sym_size(3);
  if (is_empty(input)) {
    const auto pooled = input.new_empty_symint({input.sym_size(0), input.sym_size(1), height, width});
    return {pooled + 0 * input.sum(), pooled.to(at::kByte)};
  }
  const auto [out, pixels] = at::max_pool2d_with_indices(input, kernel_size, stride, padding);
  const auto top = beginnings(height, stride, padding, input.options()).unsqueeze(-1);
  const auto left = beginnings(width, stride, padding, input.options());
  const auto y = pixels.div(columns, "floor"), x = pixels - y * columns;
  return {out, ((y - top) * kernel_size + x - left).to(at::kByte)};
}

Tensor max_pool2d_backward_formula(const Tensor& grad, const Tensor& taps, const Tensor& input, int64_t kernel_size,
                                   int64_t stride, int64_t padding) {
  check_max_pool2d_backward(grad, taps, input, kernel_size, stride, padding);
  if (is_empty(input)) return input.detach() + 0 * grad.sum();
  const auto pixels = pixels_of(taps, input, kernel_size, stride, padding);
  const auto given = at::where(pixels >= 0, grad, 0).flatten(2), to = pixels.clamp_min(0).flatten(2);
  const auto s = input.sym_sizes();
  return at::zeros_symint({s[0], s[1], s[2] * s[3]}, grad.options()).scatter_add(2, to, given).reshape_symint(s);
}

MaxPool2dOutputs max_pool2d_by_aten(const Tensor& input, int64_t kernel_size, int64_t stride, int64_t padding) {
  const auto [out, taps] = max_pool2d_forward_formula(input, kernel_size, stride, padding);
  const bool last = is_channels_last_image(input);
  return {image_in_order(out, last), image_in_order(taps, last)};
}

Tensor max_pool2d_backward_by_aten(const Tensor& grad, const Tensor& taps, const Tensor& input, int64_t kernel_size,
                                   int64_t stride, int64_t padding) {
  check_max_pool2d_backward(grad, taps, input, kernel_size, stride, padding);
  const bool last = is_channels_last_image(taps);
  if (is_empty(input)) return image_in_order(at::zeros_like(input), last);
  const auto pixels = pixels_of(taps, input, kernel_size, stride, padding);
  const auto given = at::where(pixels >= 0, grad, 0);
  const int64_t one = 1;
  return image_in_order(
      at::max_pool2d_with_indices_backward(given, input, kernel_size, stride, padding, one, false, pixels.clamp_min(0)),
      last);
}

}  // namespace dpa
