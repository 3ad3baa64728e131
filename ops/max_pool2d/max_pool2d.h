// `dpa::max_pool2d`: the maximum over windows of an image, (B, C, H, W).
//
// `max_pool2d_forward` returns where in its window each maximum lies, too, one byte each: its number, row by row. The
// output has the order of the input, contiguous or a channels-last image (ops/common/strides.h), and so have the taps and,
// after them, the input's gradient.
#pragma once
#include "ops/common/check.h"
#include "ops/common/op.h"

namespace dpa {

using MaxPool2dOutputs = std::tuple<Tensor, Tensor>;

void check_max_pool2d(const Tensor& input, int64_t kernel_size, int64_t stride, int64_t padding);
/// The check of the backward, with that of the forward's arguments.
void check_max_pool2d_backward(const Tensor& grad, const Tensor& taps, const Tensor& input, int64_t kernel_size,
                               int64_t stride, int64_t padding);
/// How many windows lie along `size` pixels.
inline c10::SymInt windows(const c10::SymInt& size, int64_t kernel_size, int64_t stride, int64_t padding) {
  return (size + (2 * padding - kernel_size)) / stride + 1;
}

/// Through the dispatcher.
inline constexpr Op<"max_pool2d", Tensor(const Tensor& input, int64_t kernel_size, int64_t stride, int64_t padding)>
    max_pool2d;
inline constexpr Op<"max_pool2d_forward",
                    MaxPool2dOutputs(const Tensor& input, int64_t kernel_size, int64_t stride, int64_t padding)>
    max_pool2d_forward;
/// Of `input` the shape and dtype count alone.
inline constexpr Op<"max_pool2d_backward", Tensor(const Tensor& grad, const Tensor& taps, const Tensor& input,
                                                  int64_t kernel_size, int64_t stride, int64_t padding)>
    max_pool2d_backward;

/// The ops in ATen ops, differentiable to any order.
MaxPool2dOutputs max_pool2d_forward_formula(const Tensor& input, int64_t kernel_size, int64_t stride, int64_t padding);
Tensor max_pool2d_backward_formula(const Tensor& grad, const Tensor& taps, const Tensor& input, int64_t kernel_size,
                                   int64_t stride, int64_t padding);

/// The same as kernels, in the order of the input.
MaxPool2dOutputs max_pool2d_by_aten(const Tensor& input, int64_t kernel_size, int64_t stride, int64_t padding);
Tensor max_pool2d_backward_by_aten(const Tensor& grad, const Tensor& taps, const Tensor& input, int64_t kernel_size,
                                   int64_t stride, int64_t padding);

}  // namespace dpa
