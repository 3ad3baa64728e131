#include "ops/conv2d_norm_act/conv2d_norm_act.h"

namespace dpa {
namespace {

constexpr const char* kConv2d = "conv2d_norm_act";

/// Whether 64 bits hold the padded extent. Symbolic sizes are those of real tensors.
bool is_countable(const c10::SymInt& extent, int64_t padding) {
  const auto n = extent.maybe_as_int();
  int64_t pads = 0, sum = 0;
  return !__builtin_mul_overflow(padding, int64_t{2}, &pads) &&
         (!n.has_value() || !__builtin_add_overflow(*n, pads, &sum));
}

}  // namespace

c10::SymInt conv2d_extent(const c10::SymInt& extent, const c10::SymInt& taps, int64_t stride, int64_t padding) {
  return (extent + 2 * padding - taps) / stride + 1;
}

void check_conv2d_norm_act(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual,
                           int64_t num_groups, double eps, int64_t stride, int64_t padding) {
  check_floating(kConv2d, "input", input);
  DPA_CHECK(input.dim() == 4, kConv2d, "input must have 4 dimensions (B, C_in, H, W)", "shape ", input.sym_sizes());
  check_parameter_type(kConv2d, "weight", weight, input);
  DPA_CHECK(weight.dim() == 4 && weight.sym_size(1) == input.sym_size(1), kConv2d,
            c10::str("weight must have shape (C_out, C_in, kh, kw) with C_in = ", input.sym_size(1)),
            weight.sym_sizes());
  check_convolution(kConv2d, "weight", weight);
  DPA_CHECK(weight.sym_size(2) >= 1 && weight.sym_size(3) >= 1, kConv2d, "weight must have at least one tap each way",
            weight.sym_sizes());
  const auto channels = weight.sym_size(0);
  check_parameter(kConv2d, "bias", bias, channels, "(C_out)", input);
  check_parameter(kConv2d, "scale", scale, channels, "(C_out)", input);
  check_parameter(kConv2d, "shift", shift, channels, "(C_out)", input);
  DPA_CHECK(num_groups >= 0 && (num_groups == 0 || channels % num_groups == 0), kConv2d,
            c10::str("num_groups must be 0, or positive and divide the ", channels, " output channels"), num_groups);
  DPA_CHECK(eps >= 0, kConv2d, "eps must be at least 0", eps);
  DPA_CHECK(stride >= 1, kConv2d, "stride must be at least 1", stride);
  DPA_CHECK(padding >= 0, kConv2d, "padding must be at least 0", padding);
  for (const int side : {2, 3}) {
    const auto extent = input.sym_size(side), taps = weight.sym_size(side);
    DPA_CHECK(is_countable(extent, padding), kConv2d, "padding must give an extent that 64 bits hold", padding);
    DPA_CHECK(extent >= 1 && extent + 2 * padding >= taps, kConv2d, "input must be large enough for one output",
              "shape ", input.sym_sizes());
  }
  check_shape(kConv2d, "residual", residual,
              {input.sym_size(0), channels, conv2d_extent(input.sym_size(2), weight.sym_size(2), stride, padding),
               conv2d_extent(input.sym_size(3), weight.sym_size(3), stride, padding)},
              "(B, C_out, H_out, W_out)", "input", input);
}

}  // namespace dpa
