#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

/// (C), of the input's dtype or float32 beside a 16-bit input.
void check_affine(const char* op, const char* name, const OptionalTensor& tensor, const Tensor& input) {
  if (!tensor.has_value()) return;
  check_same_device(op, name, *tensor, "input", input);
  const auto type = tensor->scalar_type(), given = input.scalar_type();
  DPA_CHECK(
      type == given || type == accumulate_type(given), op,
      c10::str(name, " must have the dtype of input (", given, ")", given == accumulate_type(given) ? "" : " or Float"),
      type);
  DPA_CHECK(tensor->dim() == 1 && tensor->sym_size(0) == input.sym_size(1), op,
            c10::str(name, " must have shape (C) = [", input.sym_size(1), "]"), tensor->sym_sizes());
}

}  // namespace

void check_group_norm_mish(const char* op, const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                           const OptionalTensor& shift, const OptionalTensor& residual) {
  check_floating(op, "input", input);
  DPA_CHECK(input.dim() >= 2, op, "input must have at least 2 dimensions (B, C, *)", "shape ", input.sym_sizes());
  const auto batch = input.sym_size(0), channels = input.sym_size(1);
  DPA_CHECK(num_groups > 0 && channels % num_groups == 0, op,
            c10::str("num_groups must be positive and divide the ", channels, " channels"), num_groups);
  DPA_CHECK(eps >= 0, op, "eps must be at least 0", eps);
  check_affine(op, "weight", weight, input);
  check_affine(op, "bias", bias, input);
  check_shape(op, "scale", scale, {batch, channels}, "(B, C)", "input", input);
  check_shape(op, "shift", shift, {batch, channels}, "(B, C)", "input", input);
  if (residual.has_value()) check_same(op, "residual", *residual, "input", input);
}

}  // namespace dpa
