// Channels-last images of 16 bits or float32 have kernels (kernels/cuda/max_pool2d/); everything else is ATen's.
#include "ops/common/cuda.h"

#include <torch/library.h>

#include "kernels/cuda/max_pool2d/max_pool2d.h"
#include "ops/common/strides.h"
#include "ops/max_pool2d/max_pool2d.h"

namespace dpa {
namespace {

struct MaxPool2dLaunch {
  kernels::MaxPool2d args;
  bool fits;

  MaxPool2dLaunch(const Tensor& input, bool channels_last, int64_t kernel_size, int64_t stride, int64_t padding) {
    const auto type = input.scalar_type();
    fits = channels_last && input.numel() > 0 && type != at::kDouble;
    if (!fits) return;
    const auto pooled = [&](int64_t dimension) {
      return windows(input.size(dimension), kernel_size, stride, padding).expect_int();
    };
    args = {kernel_dtype(type),
            input.size(0),
            input.size(1),
            input.size(2),
            input.size(3),
            pooled(2),
            pooled(3),
            static_cast<int>(kernel_size),
            static_cast<int>(stride),
            static_cast<int>(padding)};
    fits = kernels::max_pool2d_fits(args, static_cast<int>(input.element_size()));
  }
  Tensor pooled(const at::TensorOptions& options) const {
    return empty_image(args.batch, args.channels, args.out_height, args.out_width, true, options);
  }
};

Tensor max_pool2d_cuda(const Tensor& input_, int64_t kernel_size, int64_t stride, int64_t padding) {
  check_max_pool2d(input_, kernel_size, stride, padding);
  const c10::cuda::CUDAGuard guard(input_.device());
  const MaxPool2dLaunch in(input_, is_channels_last_image(input_), kernel_size, stride, padding);
  if (!in.fits) return std::get<0>(max_pool2d_by_aten(input_, kernel_size, stride, padding));
  const auto input = aligned(input_);
  auto out = in.pooled(input.options());
  C10_CUDA_CHECK(kernels::max_pool2d(in.args, input.const_data_ptr(), out.mutable_data_ptr(), nullptr,
                                     c10::cuda::getCurrentCUDAStream()));
  return out;
}

MaxPool2dOutputs max_pool2d_forward_cuda(const Tensor& input_, int64_t kernel_size, int64_t stride, int64_t padding) {
  check_max_pool2d(input_, kernel_size, stride, padding);
  const c10::cuda::CUDAGuard guard(input_.device());
  const MaxPool2dLaunch in(input_, is_channels_last_image(input_), kernel_size, stride, padding);
  if (!in.fits) return max_pool2d_by_aten(input_, kernel_size, stride, padding);
  const auto input = aligned(input_);
  auto out = in.pooled(input.options()), taps = in.pooled(input.options().dtype(at::kByte));
  C10_CUDA_CHECK(kernels::max_pool2d(in.args, input.const_data_ptr(), out.mutable_data_ptr(),
                                     taps.mutable_data_ptr<uint8_t>(), c10::cuda::getCurrentCUDAStream()));
  return {out, taps};
}

Tensor max_pool2d_backward_cuda(const Tensor& grad_, const Tensor& taps_, const Tensor& input, int64_t kernel_size,
                                int64_t stride, int64_t padding) {
  check_max_pool2d_backward(grad_, taps_, input, kernel_size, stride, padding);
  const c10::cuda::CUDAGuard guard(input.device());
  const MaxPool2dLaunch in(input, is_channels_last_image(taps_), kernel_size, stride, padding);
  if (!in.fits) return max_pool2d_backward_by_aten(grad_, taps_, input, kernel_size, stride, padding);
  const auto grad = aligned(image_in_order(grad_, true)), taps = aligned(image_in_order(taps_, true));
  auto grad_input = empty_image(in.args.batch, in.args.channels, in.args.height, in.args.width, true, input.options());
  C10_CUDA_CHECK(kernels::max_pool2d_backward(in.args, grad.const_data_ptr(), taps.const_data_ptr<uint8_t>(),
                                              grad_input.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream()));
  return grad_input;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("max_pool2d", &max_pool2d_cuda);
  m.impl("max_pool2d_forward", &max_pool2d_forward_cuda);
  m.impl("max_pool2d_backward", &max_pool2d_backward_cuda);
}

}  // namespace dpa
