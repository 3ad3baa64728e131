#include "ops/common/strides.h"
#include "ops/conv2d/conv2d.h"

namespace dpa {
namespace {

/// Whether 64 bits hold the padded extent. Symbolic sizes are those of real tensors.
bool holds_padded(const c10::SymInt& extent, int64_t padding) {
  const auto n = extent.maybe_as_int();
  int64_t pads = 0, sum = 0;
  return !__builtin_mul_overflow(padding, int64_t{2}, &pads) &&
         (!n.has_value() || !__builtin_add_overflow(*n, pads, &sum));
}

}  // namespace

c10::SymInt conv2d_extent(const c10::SymInt& extent, const c10::SymInt& taps, int64_t stride, int64_t padding) {
  return (extent + 2 * padding - taps) / stride + 1;
}

bool conv2d_channels_last(const Tensor& input, const Tensor& weight) {
  return is_channels_last_image(input) || is_channels_last_image(weight);
}

void check_conv2d(const char* op, const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding) {
  check_floating(op, "input", input);
  DPA_CHECK(input.dim() == 4, op, "input must have 4 dimensions (B, C_in, H, W)", "shape ", input.sym_sizes());
  check_parameter_type(op, "weight", weight, input);
  DPA_CHECK(weight.dim() == 4 && weight.sym_size(1) == input.sym_size(1), op,
            c10::str("weight must have shape (C_out, C_in, kh, kw) with C_in = ", input.sym_size(1)),
            weight.sym_sizes());
  check_convolution(op, "weight", weight);
  DPA_CHECK(weight.sym_size(2) >= 1 && weight.sym_size(3) >= 1, op, "weight must have at least one tap each way",
            weight.sym_sizes());
  DPA_CHECK(stride >= 1, op, "stride must be at least 1", stride);
  DPA_CHECK(padding >= 0, op, "padding must be at least 0", padding);
  for (const int side : {2, 3}) {
    const auto extent = input.sym_size(side), taps = weight.sym_size(side);
    DPA_CHECK(holds_padded(extent, padding), op, "padding must give an extent that 64 bits hold", padding);
    DPA_CHECK(extent >= 1 && extent + 2 * padding >= taps, op, "input must be large enough for one output", "shape ",
              input.sym_sizes());
  }
}

void check_conv2d_grad(const Tensor& grad, const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding) {
  constexpr const char* op = "conv2d_backward";
  check_conv2d(op, input, weight, stride, padding);
  check_shape(
      op, "grad", grad,
      {input.sym_size(0), weight.sym_size(0), conv2d_extent(input.sym_size(2), weight.sym_size(2), stride, padding),
       conv2d_extent(input.sym_size(3), weight.sym_size(3), stride, padding)},
      "(B, C_out, H_out, W_out)", "input", input);
}

}  // namespace dpa
