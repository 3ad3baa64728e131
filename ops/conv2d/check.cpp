#include "ops/common/strides.h"
#include "ops/conv2d/conv2d.h"

namespace dpa {
std::array<c10::SymInt, 4> conv2d_sizes(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding) {
  const auto extent = [&](int side) {
    return (input.sym_size(side) + 2 * padding - weight.sym_size(side)) / stride + 1;
  };
  return {input.sym_size(0), weight.sym_size(0), extent(2), extent(3)};
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
  constexpr int64_t kMostPadding = int64_t{1} << 61;
  const auto padded = [&](int side) { return input.sym_size(side) + 2 * padding; };
  DPA_CHECK(padding <= kMostPadding && is_countable({input.sym_size(0), input.sym_size(1), padded(2), padded(3)}) &&
                is_countable({input.sym_size(0), weight.sym_size(0), padded(2), padded(3)}),
            op, "padding must give images whose bytes 64 bits count", padding);
  for (const int side : {2, 3})
    DPA_CHECK(input.sym_size(side) >= 1 && padded(side) >= weight.sym_size(side), op,
              "input must be large enough for one output", "shape ", input.sym_sizes());
}

void check_conv2d_grad(const Tensor& grad, const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding) {
  constexpr const char* op = "conv2d_backward";
  check_conv2d(op, input, weight, stride, padding);
  const auto [batch, channels, height, width] = conv2d_sizes(input, weight, stride, padding);
  check_shape(op, "grad", grad, {batch, channels, height, width}, "(B, C_out, H_out, W_out)", "input", input);
}

}  // namespace dpa
