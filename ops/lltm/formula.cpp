// `dpa::lltm` and its backward in ATen ops: what forward-mode AD and second derivatives differentiate.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>

#include "ops/lltm/lltm.h"

namespace dpa {
namespace {

/// The cell's quantities in the dtype of the arithmetic.
struct LltmTerms {
  at::ScalarType wide;
  Tensor inputs, weights, linear, input_gate, output_gate, raw_candidate, candidate, cell, squashed;

  LltmTerms(const Tensor& input, const Tensor& weights_, const Tensor& bias, const Tensor& old_h,
            const Tensor& old_cell)
      : wide(accumulate_type(input.scalar_type())) {
    inputs = at::cat({old_h, input}, 1).to(wide);
    weights = weights_.to(wide);
    linear = at::mm(inputs, weights.t());
    const auto gates = (linear + bias.to(wide)).chunk(3, 1);
    input_gate = at::sigmoid(gates[0]);
    output_gate = at::sigmoid(gates[1]);
    raw_candidate = gates[2];
    candidate = at::elu(raw_candidate);
    cell = old_cell.to(wide) + candidate * input_gate;
    squashed = at::tanh(cell);
  }
};

}  // namespace

LltmState lltm_formula(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                       const Tensor& old_cell) {
  auto [new_h, new_cell, linear] = lltm_forward_formula(input, weights, bias, old_h, old_cell);
  return {new_h, new_cell};
}

LltmStateAndGates lltm_forward_formula(const Tensor& input, const Tensor& weights, const Tensor& bias,
                                       const Tensor& old_h, const Tensor& old_cell) {
  check_lltm(input, weights, bias, old_h, old_cell);
  const LltmTerms t(input, weights, bias, old_h, old_cell);
  return {(t.squashed * t.output_gate).to(input.scalar_type()), t.cell.to(input.scalar_type()), t.linear};
}

LltmGradients lltm_backward_formula(const Tensor& grad_h, const Tensor& grad_cell, const Tensor& input,
                                    const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                                    const Tensor& old_cell, LltmMask mask) {
  const LltmTerms t(input, weights, bias, old_h, old_cell);
  const auto gh = grad_h.to(t.wide);
  const auto slope = at::where(t.raw_candidate > 0, at::ones_like(t.raw_candidate), at::exp(t.raw_candidate));
  const auto to_cell = grad_cell.to(t.wide) + gh * t.output_gate * (1 - t.squashed * t.squashed);
  const auto grad_gates =
      at::cat({to_cell * t.candidate * t.input_gate * (1 - t.input_gate),
               gh * t.squashed * t.output_gate * (1 - t.output_gate), to_cell * t.input_gate * slope},
              1);
  const auto grad_inputs = at::mm(grad_gates, t.weights);
  const auto state = old_h.sym_size(1), end = state + input.sym_size(1);
  const auto type = input.scalar_type();
  LltmGradients result;
  if (mask[0]) std::get<0>(result) = grad_inputs.slice_symint(1, state, end).to(type);
  if (mask[1]) std::get<1>(result) = at::mm(grad_gates.t(), t.inputs).to(type);
  if (mask[2]) std::get<2>(result) = grad_gates.sum(0).to(type).view_symint(bias.sym_sizes());
  if (mask[3]) std::get<3>(result) = grad_inputs.slice_symint(1, 0, state).to(type);
  if (mask[4]) std::get<4>(result) = to_cell.to(type);
  return result;
}

}  // namespace dpa
