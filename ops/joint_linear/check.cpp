#include "ops/joint_linear/joint_linear.h"

namespace dpa {

void check_joint_linear(const Tensor& input, at::TensorList weights, at::TensorList biases,
                        const OptionalTensor& rest) {
  constexpr const char* op = "joint_linear";
  check_floating(op, "input", input);
  DPA_CHECK(input.dim() == 2, op, "input must have 2 dimensions (B, C_in)", "shape ", input.sym_sizes());
  auto channels = input.sym_size(1);
  if (rest.has_value()) {
    check_same_device(op, "rest", *rest, "input", input);
    check_same_type(op, "rest", *rest, "input", input);
    DPA_CHECK(rest->dim() == 2 && rest->sym_size(0) == input.sym_size(0), op,
              c10::str("rest must have shape (B, C_rest) with B = ", input.sym_size(0)), rest->sym_sizes());
    channels = channels + rest->sym_size(1);
  }
  DPA_CHECK(!weights.empty(), op, "weights must name at least one layer", "none");
  DPA_CHECK(biases.size() == weights.size(), op, c10::str("biases must be as many as the ", weights.size(), " weights"),
            biases.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor &weight = weights[i], &bias = biases[i];
    check_parameter_type(op, "weights", weight, input);
    check_same_type(op, "weights", weight, "the first weight", weights[0]);
    DPA_CHECK(weight.dim() == 2 && weight.sym_size(1) == channels, op,
              c10::str("weights must have shape (C_i, C_in) with C_in = ", channels), weight.sym_sizes());
    check_parameter(op, "biases", bias, weight.sym_size(0), "(C_i)", input);
    check_same_type(op, "biases", bias, "the first weight", weights[0]);
  }
}

void check_joint_linear_grad(const Tensor& grad, const Tensor& input, at::TensorList weights) {
  check_shape("joint_linear_backward", "grad", grad, {input.sym_size(0), joint_outputs(weights)}, "(B, sum of C_i)",
              "input", input);
}

c10::SymInt joint_outputs(at::TensorList weights) {
  c10::SymInt outputs = 0;
  for (const auto& weight : weights) outputs = outputs + weight.sym_size(0);
  return outputs;
}

}  // namespace dpa
