#include "ops/conv2d_norm_act/conv2d_norm_act.h"

namespace dpa {

void check_conv2d_norm_act(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual,
                           int64_t num_groups, double eps, int64_t stride, int64_t padding) {
  const char* const op = conv2d_norm_act.name();
  check_conv2d(op, input, weight, stride, padding);
  const auto channels = weight.sym_size(0);
  check_parameter(op, "bias", bias, channels, "(C_out)", input);
  check_parameter(op, "scale", scale, channels, "(C_out)", input);
  check_parameter(op, "shift", shift, channels, "(C_out)", input);
  DPA_CHECK(num_groups >= 0 && (num_groups == 0 || channels % num_groups == 0), op,
            c10::str("num_groups must be 0, or positive and divide the ", channels, " output channels"), num_groups);
  DPA_CHECK(eps >= 0, op, "eps must be at least 0", eps);
  const auto [batch, _, height, width] = conv2d_sizes(input, weight, stride, padding);
  check_shape(op, "residual", residual, {batch, channels, height, width}, "(B, C_out, H_out, W_out)", "input", input);
}

}  // namespace dpa
