// `dpa::lltm`: one step of a long-term memory cell without a forget gate (the cell of PyTorch's extension tutorial).
#pragma once
#include "ops/common/check.h"
#include "ops/common/op.h"

namespace dpa {

/// new_h and new_cell, and, from lltm_forward, the gates' GEMM before its bias, in the accumulate dtype.
using LltmState = std::tuple<Tensor, Tensor>;
using LltmStateAndGates = std::tuple<Tensor, Tensor, Tensor>;
/// Gradients of input, weights, bias, old_h and old_cell; undefined where the mask is false.
using LltmGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using LltmMask = std::array<bool, 5>;

void check_lltm(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                const Tensor& old_cell);
/// The check of the backward beyond that of the forward's arguments.
void check_lltm_backward(const Tensor& grad_h, const Tensor& grad_cell, const Tensor& old_h, const Tensor& gates);

/// Through the dispatcher.
inline constexpr Op<"lltm", LltmState(const Tensor& input, const Tensor& weights, const Tensor& bias,
                                      const Tensor& old_h, const Tensor& old_cell)>
    lltm;
inline constexpr Op<"lltm_forward", LltmStateAndGates(const Tensor& input, const Tensor& weights, const Tensor& bias,
                                                      const Tensor& old_h, const Tensor& old_cell)>
    lltm_forward;
inline constexpr Op<"lltm_backward", LltmGradients(const Tensor& grad_h, const Tensor& grad_cell, const Tensor& input,
                                                   const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                                                   const Tensor& old_cell, const Tensor& gates, LltmMask output_mask)>
    lltm_backward;

/// The op and its backward in ATen ops, differentiable to any order.
LltmState lltm_formula(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                       const Tensor& old_cell);
LltmStateAndGates lltm_forward_formula(const Tensor& input, const Tensor& weights, const Tensor& bias,
                                       const Tensor& old_h, const Tensor& old_cell);
LltmGradients lltm_backward_formula(const Tensor& grad_h, const Tensor& grad_cell, const Tensor& input,
                                    const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                                    const Tensor& old_cell, LltmMask output_mask);

/// x @ weights^T in the dtype of accumulation, x being cat(old_h, input).
Tensor lltm_gemm(const Tensor& x, const Tensor& weights);

/// The gradients of that GEMM's operands, from its result's. Where those of input and old_h are both wanted, they
/// come side by side in `x`.
struct LltmGemmGradients {
  Tensor x, input, old_h, weights;
};
LltmGemmGradients lltm_gemm_gradients(const Tensor& grad_gates, const Tensor& x, const Tensor& weights, int64_t state,
                                      LltmMask output_mask);

}  // namespace dpa
