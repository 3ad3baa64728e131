#include "ops/max_pool2d/max_pool2d.h"

namespace dpa {

void check_max_pool2d(const Tensor& input, int64_t kernel_size, int64_t stride, int64_t padding) {
  const char* const op = max_pool2d.name();
  check_floating(op, "input", input);
  DPA_CHECK(input.dim() == 4, op, "input must have 4 dimensions (B, C, H, W)", "shape ", input.sym_sizes());
  DPA_CHECK(kernel_size >= 1 && kernel_size <= 16, op, "kernel_size must be 1 to 16", kernel_size);
  DPA_CHECK(stride >= 1 && stride <= INT32_MAX, op, "stride must be at least 1", stride);
  DPA_CHECK(padding >= 0 && 2 * padding <= kernel_size, op, "padding must be 0 to half of kernel_size", padding);
  for (const int64_t dimension : {2, 3})
    DPA_CHECK(input.sym_size(dimension) + 2 * padding >= kernel_size, op,
              "input must be as large as a window, padding included", "shape ", input.sym_sizes());
}

void check_max_pool2d_backward(const Tensor& grad, const Tensor& taps, const Tensor& input, int64_t kernel_size,
                               int64_t stride, int64_t padding) {
  check_max_pool2d(input, kernel_size, stride, padding);
  const char* const op = max_pool2d_backward.name();
  const auto pooled = [&](int64_t dimension) {
    return windows(input.sym_size(dimension), kernel_size, stride, padding);
  };
  check_shape(op, "grad", grad, {input.sym_size(0), input.sym_size(1), pooled(2), pooled(3)}, "(B, C, OH, OW)", "input",
              input);
  check_same_device(op, "taps", taps, "input", input);
  DPA_CHECK(taps.scalar_type() == at::kByte, op, "taps must be uint8", taps.scalar_type());
  DPA_CHECK(taps.sym_sizes().equals(grad.sym_sizes()), op,
            c10::str("taps must have the shape of grad ", grad.sym_sizes()), taps.sym_sizes());
}

}  // namespace dpa
