// CUDA launchers of `dpa::lltm`. Tensors are contiguous; those marked A are in the dtype of the arithmetic.
// X = cat(old_h, input) is (batch, inputs), inputs = state + features; at small sizes it is never put together in
// memory.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace dpa::kernels {

struct Lltm {
  DType dtype;
  const void* input;     // (batch, features)
  const void* weights;   // (3 * state, state + features)
  const void* bias;      // (3 * state)
  const void* old_h;     // (batch, state)
  const void* old_cell;  // (batch, state)
  void* new_h;           // (batch, state)
  void* new_cell;        // (batch, state)
  void* gates;           // A (batch, 3 * state): the GEMM's outputs before the bias
  int64_t batch, features, state;
};

struct LltmBackward {
  Lltm forward;           // `gates` is read; new_h and new_cell are not used
  const void* grad_h;     // (batch, state), any strides: the gradient of a sum has none
  const void* grad_cell;  // (batch, state), any strides
  int64_t grad_h_strides[2], grad_cell_strides[2];
  void* grad_gates;     // A (batch, 3 * state)
  void* grad_old_cell;  // (batch, state), or null
  // What lltm_operand_gradients writes; null where not wanted.
  void *grad_input, *grad_weights, *grad_bias, *grad_old_h;
};

/// Two matrices of as many rows, side by side in a third.
struct LltmRows {
  DType dtype;
  void *left, *right;  // (rows, left_columns), (rows, right_columns)
  void* both;          // (rows, left_columns + right_columns)
  int64_t rows, left_columns, right_columns;
};

/// Everything in one kernel, for small sizes. `gates` may be null.
cudaError_t lltm_small(const Lltm& args, cudaStream_t stream);
/// `both` from `left` and `right`.
cudaError_t lltm_join(const LltmRows& args, cudaStream_t stream);
/// `left` and `right` from `both`.
cudaError_t lltm_split(const LltmRows& args, cudaStream_t stream);
/// The state from the GEMM's outputs in `gates`.
cudaError_t lltm_state(const Lltm& args, cudaStream_t stream);
/// grad_gates and grad_old_cell.
cudaError_t lltm_gate_gradients(const LltmBackward& args, cudaStream_t stream);
/// The gradients of the GEMM's operands from grad_gates, in one kernel, for small sizes.
cudaError_t lltm_operand_gradients(const LltmBackward& args, cudaStream_t stream);
/// grad_bias alone: the sum of grad_gates over the batch.
cudaError_t lltm_bias_gradient(const LltmBackward& args, cudaStream_t stream);

}  // namespace dpa::kernels
