// `dpa::conv2d`: a convolution of images, without bias: an encoder's layer in training, where a norm follows.
//
// The output is channels-last where the input or the weight is, as PyTorch's is; gradients have the order of what they
// are of. On CUDA, images of at most four channels at a stride of two, an encoder's first layer, have kernels
// (kernels/cuda/conv2d/few_channels.h) in 16 bits, and in float32 where PyTorch's convolutions would multiply in TF32;
// there, on Hopper, so has the weight's gradient of filters of 3 x 3 (kernels/cuda/conv2d/wgrad.h). Everything else is
// PyTorch's convolution.
#pragma once
#include <array>

#include "ops/common/check.h"
#include "ops/common/op.h"

namespace dpa {

/// Gradients of input and weight; undefined where the mask is false.
using Conv2dGradients = std::tuple<Tensor, Tensor>;
using Conv2dMask = std::array<bool, 2>;

/// Checks of a convolution in `op`, of which there may be more in its own.
void check_conv2d(const char* op, const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding);
void check_conv2d_grad(const Tensor& grad, const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding);

/// The sizes (B, C_out, H_out, W_out) of the output.
std::array<c10::SymInt, 4> conv2d_sizes(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding);
/// Whether the output is channels-last.
bool conv2d_channels_last(const Tensor& input, const Tensor& weight);

/// The dtype to convolve in: a GPU's tensor cores take 16 bits, a CPU's convolutions add up in the type that they are given.
inline at::ScalarType conv2d_arithmetic(const Tensor& input) {
  return input.is_cpu() ? accumulate_type(input.scalar_type()) : input.scalar_type();
}

/// Through the dispatcher.
inline constexpr Op<"conv2d", Tensor(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding)>
    conv2d;
inline constexpr Op<"conv2d_backward", Conv2dGradients(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                       int64_t stride, int64_t padding, Conv2dMask output_mask)>
    conv2d_backward;

/// The op and its backward in ATen ops, differentiable to any order, in the order that these give.
Tensor conv2d_formula(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding);
Conv2dGradients conv2d_backward_formula(const Tensor& grad, const Tensor& input, const Tensor& weight, int64_t stride,
                                        int64_t padding, Conv2dMask output_mask);

/// The same as kernels, in the order that they promise.
Tensor conv2d_by_aten(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding);
Conv2dGradients conv2d_backward_by_aten(const Tensor& grad, const Tensor& input, const Tensor& weight, int64_t stride,
                                        int64_t padding, Conv2dMask output_mask);

}  // namespace dpa
