#include "ops/batch_norm_act/batch_norm_act.h"

namespace dpa {

void check_batch_norm_act(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                          const OptionalTensor& residual) {
  const char* const op = batch_norm_act.name();
  check_floating(op, "input", input);
  DPA_CHECK(input.dim() >= 2, op, "input must have at least 2 dimensions (B, C, *)", "shape ", input.sym_sizes());
  DPA_CHECK(eps >= 0, op, "eps must be at least 0", eps);
  check_parameter(op, "weight", weight, input.sym_size(1), "(C)", input);
  check_parameter(op, "bias", bias, input.sym_size(1), "(C)", input);
  if (residual.has_value()) check_same(op, "residual", *residual, "input", input);
}

void check_batch_norm_act_backward(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& var) {
  const char* const op = batch_norm_act_backward.name();
  check_same(op, "grad", grad, "input", input);
  const auto channels = input.sym_size(1);
  const auto statistic = [&](const char* name, const Tensor& tensor) {
    check_same_device(op, name, tensor, "input", input);
    const auto type = accumulate_type(input.scalar_type());
    DPA_CHECK(tensor.scalar_type() == type, op, c10::str(name, " must have the dtype of accumulation (", type, ")"),
              tensor.scalar_type());
    DPA_CHECK(tensor.dim() == 1 && tensor.sym_size(0) == channels, op,
              c10::str(name, " must have shape (C) = [", channels, "]"), tensor.sym_sizes());
  };
  statistic("mean", mean), statistic("var", var);
}

}  // namespace dpa
