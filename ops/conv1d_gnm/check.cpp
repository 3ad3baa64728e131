#include "ops/conv1d_gnm/conv1d_gnm.h"

namespace dpa {

void check_conv1d_gnm(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                      const OptionalTensor& gn_weight, const OptionalTensor& gn_bias, int64_t num_groups, double eps,
                      const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual) {
  constexpr const char* op = "conv1d_gnm";
  check_floating(op, "input", input);
  DPA_CHECK(input.dim() == 3, op, "input must have 3 dimensions (B, C_in, T)", "shape ", input.sym_sizes());
  check_parameter_type(op, "conv_weight", conv_weight, input);
  DPA_CHECK(conv_weight.dim() == 3 && conv_weight.sym_size(1) == input.sym_size(1), op,
            c10::str("conv_weight must have shape (C_out, C_in, k) with C_in = ", input.sym_size(1)),
            conv_weight.sym_sizes());
  check_convolution(op, "conv_weight", conv_weight);
  DPA_CHECK(input.sym_size(2) >= 1, op, "input must be long enough for one output", "length ", input.sym_size(2));
  DPA_CHECK(conv_weight.sym_size(2) % 2 == 1, op, "conv_weight must have an odd kernel size, so that the length stays",
            conv_weight.sym_size(2));
  const auto batch = input.sym_size(0), channels = conv_weight.sym_size(0);
  DPA_CHECK(num_groups > 0 && channels % num_groups == 0, op,
            c10::str("num_groups must be positive and divide the ", channels, " output channels"), num_groups);
  DPA_CHECK(eps >= 0, op, "eps must be at least 0", eps);
  check_parameter(op, "conv_bias", conv_bias, channels, "(C_out)", input);
  check_parameter(op, "gn_weight", gn_weight, channels, "(C_out)", input);
  check_parameter(op, "gn_bias", gn_bias, channels, "(C_out)", input);
  check_shape(op, "scale", scale, {batch, channels}, "(B, C_out)", "input", input);
  check_shape(op, "shift", shift, {batch, channels}, "(B, C_out)", "input", input);
  check_shape(op, "residual", residual, {batch, channels, input.sym_size(2)}, "(B, C_out, T)", "input", input);
}

int64_t conv_padding(const Tensor& conv_weight) { return conv_weight.sym_size(2).guard_int(__FILE__, __LINE__) / 2; }

}  // namespace dpa
