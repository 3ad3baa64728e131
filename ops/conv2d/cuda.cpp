#include "ops/common/cuda.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/cuda/conv2d/few_channels.h"
#include "kernels/cuda/conv2d/wgrad.h"
#include "ops/common/strides.h"
#include "ops/conv1d/conv1d.h"
#include "ops/conv2d/conv2d.h"

namespace dpa {
namespace {

using kernels::conv2d::FewChannels, kernels::conv2d::ImageWgrad;

void copy_strides(const Tensor& tensor, int64_t (&to)[4]) { std::copy_n(tensor.strides().begin(), 4, to); }

/// The sizes for the kernels of few channels, where they take them.
std::optional<FewChannels> few_channels(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding) {
  const auto type = input.scalar_type();
  const bool multiplies = type == at::kFloat ? convolves_in_tf32() : type != at::kDouble;
  const int64_t taps = weight.size(2);
  if (!multiplies || stride != 2 || weight.size(3) != taps || padding >= taps || !conv2d_channels_last(input, weight))
    return std::nullopt;
  FewChannels conv{kernel_dtype(type), input.size(0), input.size(1), input.size(2), input.size(3)};
  const auto sizes = conv2d_sizes(input, weight, stride, padding);
  copy_strides(input, conv.image_strides);
  conv.out_channels = weight.size(0), conv.out_height = sizes[2].expect_int(), conv.out_width = sizes[3].expect_int();
  conv.taps = static_cast<int>(std::min<int64_t>(taps, INT32_MAX)), conv.padding = static_cast<int>(padding);
  return kernels::conv2d::takes_few_channels(conv) ? std::optional(conv) : std::nullopt;
}

Tensor conv2d_cuda(const Tensor& input, const Tensor& weight_, int64_t stride, int64_t padding) {
  check_conv2d("conv2d", input, weight_, stride, padding);
  const c10::cuda::CUDAGuard guard(input.device());
  auto conv = few_channels(input, weight_, stride, padding);
  if (!conv) return conv2d_by_aten(input, weight_, stride, padding);
  const auto weight = weight_.to(input.scalar_type());
  copy_strides(weight, conv->weight_strides);
  auto out = empty_image(conv->batch, conv->out_channels, conv->out_height, conv->out_width, true, input.options());
  C10_CUDA_CHECK(kernels::conv2d::few_channels_fprop(*conv, input.const_data_ptr(), weight.const_data_ptr(),
                                                     out.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream()));
  return out;
}

/// The sizes for the kernel of the weight's gradient in TF32, where it takes them.
std::optional<ImageWgrad> image_wgrad(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding) {
  constexpr int64_t kTaps = kernels::conv2d::kWgradTaps;
  const bool served = input.scalar_type() == at::kFloat && weight.size(2) == kTaps && weight.size(3) == kTaps &&
                      stride <= 2 && padding < kTaps && conv2d_channels_last(input, weight) && convolves_in_tf32();
  if (!served) return std::nullopt;
  const auto sizes = conv2d_sizes(input, weight, stride, padding);
  const ImageWgrad conv{input.size(0),
                        input.size(1),
                        input.size(2),
                        input.size(3),
                        weight.size(0),
                        sizes[2].expect_int(),
                        sizes[3].expect_int(),
                        static_cast<int>(stride),
                        static_cast<int>(padding)};
  return kernels::conv2d::takes_image_wgrad(conv) ? std::optional(conv) : std::nullopt;
}

/// The weight's gradient, in the weight's order, where there are kernels for it; else undefined.
Tensor own_weight_gradient(const Tensor& grad_, const Tensor& input, const Tensor& weight, int64_t stride,
                           int64_t padding) {
  auto few = few_channels(input, weight, stride, padding);
  const auto images = few ? std::nullopt : image_wgrad(input, weight, stride, padding);
  if (!few && !images) return {};
  const auto grad = aligned(image_in_order(grad_, true));
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto made = empty_image_like(weight, is_channels_last_image(weight), input.options());
  if (few) {
    copy_strides(made, few->weight_strides);
    const auto between = workspace(kernels::conv2d::few_channels_workspace(*few), input);
    C10_CUDA_CHECK(kernels::conv2d::few_channels_wgrad(*few, input.const_data_ptr(), grad.const_data_ptr(),
                                                       between.mutable_data_ptr(), made.mutable_data_ptr(), stream));
  } else {
    int64_t strides[4];
    copy_strides(made, strides);
    const auto x = aligned(image_in_order(input, true));
    const auto between = workspace(kernels::conv2d::image_wgrad_workspace(*images), input);
    C10_CUDA_CHECK(kernels::conv2d::image_wgrad(*images, x.const_data_ptr<float>(), grad.const_data_ptr<float>(),
                                                static_cast<float*>(between.mutable_data_ptr()),
                                                made.mutable_data_ptr<float>(), strides, stream));
  }
  return made.to(weight.scalar_type());
}

Conv2dGradients conv2d_backward_cuda(const Tensor& grad, const Tensor& input, const Tensor& weight, int64_t stride,
                                     int64_t padding, Conv2dMask mask) {
  check_conv2d_grad(grad, input, weight, stride, padding);
  const c10::cuda::CUDAGuard guard(input.device());
  const auto own = mask[1] ? own_weight_gradient(grad, input, weight, stride, padding) : Tensor();
  if (own.defined()) mask[1] = false;
  if (!mask[0] && !mask[1]) return {Tensor(), own};
  auto gradients = conv2d_backward_by_aten(grad, input, weight, stride, padding, mask);
  if (own.defined()) std::get<1>(gradients) = own;
  return gradients;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("conv2d", &conv2d_cuda);
  m.impl("conv2d_backward", &conv2d_backward_cuda);
}

}  // namespace dpa
