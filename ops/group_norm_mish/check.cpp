#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {

void check_group_norm_mish(const char* op, const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                           const OptionalTensor& shift) {
  check_floating(op, "input", input);
  DPA_CHECK(input.dim() >= 2, op, "input must have at least 2 dimensions (B, C, *)", "shape ", input.sym_sizes());
  const auto batch = input.sym_size(0), channels = input.sym_size(1);
  DPA_CHECK(num_groups > 0 && channels % num_groups == 0, op,
            c10::str("num_groups must be positive and divide the ", channels, " channels"), num_groups);
  DPA_CHECK(eps >= 0, op, "eps must be at least 0", eps);
  check_shape(op, "weight", weight, {channels}, "(C)", "input", input);
  check_shape(op, "bias", bias, {channels}, "(C)", "input", input);
  check_shape(op, "scale", scale, {batch, channels}, "(B, C)", "input", input);
  check_shape(op, "shift", shift, {batch, channels}, "(B, C)", "input", input);
}

}  // namespace dpa
