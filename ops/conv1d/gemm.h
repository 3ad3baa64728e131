// What the ops that call kernels/cuda/conv1d share.
#pragma once
#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include "kernels/cuda/conv1d/conv1d.h"
#include "kernels/plans/conv1d/plan.h"
#include "ops/common/cuda.h"
#include "ops/common/strides.h"
#include "ops/conv1d/branches.h"

namespace dpa {

namespace gemm = kernels::conv1d;

/// fprop, or dgrad of one tensor to one, on the current stream, or on the side of a branch that has forked. Returns its
/// workspace. That lives until the branch has joined; of the main stream, as long as a branch that forked before may be
/// given memory.
[[nodiscard]] inline Tensor convolve(bool dgrad, const gemm::Conv1d& conv, const gemm::Rows& in,
                                     const gemm::Weights& weights, const gemm::Addends& addends, const Tensor& out,
                                     Branches* branch = nullptr) {
  const auto own = workspace(dgrad ? gemm::dgrad_workspace(conv) : gemm::fprop_workspace(conv, /*group=*/0), out);
  void *const to = out.mutable_data_ptr(), *const between = mutable_data_or_null(own);
  if (branch) branch->fork_for_fills();
  const auto stream = branch ? branch->side() : c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(dgrad ? gemm::dgrad(conv, in.rows, weights, addends, {to}, between, stream)
                       : gemm::fprop(conv, in, weights, addends, to, between, stream));
  return own;
}

/// Rows of channels as the GEMMs read them: padded to a multiple of 8 and aligned to 16 bytes.
inline Tensor padded_rows(const Tensor& tensor) {
  const auto rows = in_order(tensor, /*channels_last=*/true);
  const int64_t channels = rows.size(1), width = gemm::padded(channels);
  if (width == channels && is_aligned(rows)) return rows;
  auto out = at::empty({rows.size(0) * rows.size(2), width}, rows.options());
  C10_CUDA_CHECK(gemm::pad_rows(rows.const_data_ptr(), out.size(0), channels, out.mutable_data_ptr(),
                                c10::cuda::getCurrentCUDAStream(), kernel_dtype(rows.scalar_type())));
  return out;
}

/// Of the packed form of a weight, for tensors of some dtype.
inline int weight_parts(const Tensor& weight, at::ScalarType type) {
  return gemm::weight_parts(kernel_dtype(type), weight.numel());
}
/// A convolution that keeps its input's length, in the kernels' sizes.
inline gemm::Conv1d same_length(const Tensor& weight, at::ScalarType type, int64_t batch, int64_t length) {
  const int taps = static_cast<int>(weight.size(2));
  return {kernel_dtype(type), batch, length, weight.size(0), length, weight.size(1), taps, /*stride=*/1, taps / 2};
}
/// Whether the kernels, of tensors of the weight's type, read it as it lies.
inline bool reads_in_place(const gemm::Conv1d& conv, const Tensor& weight) {
  return weight.is_contiguous() && weight.scalar_type() == at::kFloat && is_aligned(weight) &&
         gemm::takes_in_place(conv);
}

/// A contiguous weight of two or three dimensions to be packed to `packed`.
inline gemm::Packing packing(const Tensor& weight, void* packed, at::ScalarType type) {
  gemm::Packing all{weight.const_data_ptr(), packed, weight.size(0), weight.size(1)};
  all.taps = weight.dim() == 3 ? static_cast<int>(weight.size(2)) : 1;
  all.parts = weight_parts(weight, type);
  return all;
}

/// The gradients of a layer that is one GEMM, each where it is wanted, of the layer's own sizes. `grad` and `input` are
/// padded rows; a transposed layer exchanges data and weight gradient's operands. The input's gradient goes first:
/// others wait for it. Each returns its workspace.
[[nodiscard]] inline Tensor input_backward(const gemm::Conv1d& conv, bool transposed, const Tensor& grad,
                                           const gemm::Weights& weights, const Tensor& to) {
  return convolve(/*dgrad=*/!transposed, conv, {grad.const_data_ptr()}, weights, {}, to);
}
[[nodiscard]] inline Tensor parameter_backward(const gemm::Conv1d& conv, bool transposed, const Tensor& grad,
                                               const Tensor& input, const Tensor& weight, const Tensor& bias,
                                               Branches& branches) {
  const auto own = weight.defined() ? workspace(gemm::wgrad_workspace(conv), grad) : Tensor();
  branches.fork_for_fills();
  const auto stream = branches.side();
  const int64_t rows = conv.batch * (transposed ? conv.x_length : conv.y_length);
  const int64_t channels = transposed ? conv.x_channels : conv.y_channels;
  if (weight.defined()) {
    const auto &y = transposed ? input : grad, &x = transposed ? grad : input;
    C10_CUDA_CHECK(gemm::wgrad(conv, y.const_data_ptr(), {x.const_data_ptr()}, weight.mutable_data_ptr(),
                               kernel_dtype(weight.scalar_type()), mutable_data_or_null(own), stream));
  }
  if (bias.defined())
    C10_CUDA_CHECK(gemm::column_sums(conv.dtype, grad.const_data_ptr(), rows, channels, gemm::padded(channels),
                                     bias.mutable_data_ptr(), kernel_dtype(bias.scalar_type()), stream));
  return own;
}

}  // namespace dpa
