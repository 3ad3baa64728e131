#include "ops/common/cuda.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "kernels/group_norm_mish.h"
#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

/// Keeps the contiguous copies alive beside the launcher's arguments.
struct Launch {
  Tensor input, weight, bias, scale, shift;
  kernels::GroupNormMish args;

  Launch(const Tensor& input_, int64_t num_groups, const OptionalTensor& weight_, const OptionalTensor& bias_,
         double eps, const OptionalTensor& scale_, const OptionalTensor& shift_, const Tensor& out) {
    const auto contiguous = [](const OptionalTensor& t) { return t.has_value() ? t->contiguous() : Tensor(); };
    input = input_.contiguous();
    weight = contiguous(weight_), bias = contiguous(bias_), scale = contiguous(scale_), shift = contiguous(shift_);
    const int64_t batch = input.size(0), channels = input.size(1);
    const int64_t inner = batch * channels > 0 ? input.numel() / (batch * channels) : 0;
    args = {kernel_dtype(input.scalar_type()),
            input.const_data_ptr(),
            data_or_null(weight),
            data_or_null(bias),
            data_or_null(scale),
            data_or_null(shift),
            mutable_data_or_null(out),
            batch,
            channels,
            inner,
            num_groups,
            eps};
  }
};

NormGradients group_norm_mish_backward_cuda(const Tensor& grad_, const Tensor& input, int64_t num_groups,
                                            const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                            const OptionalTensor& scale, const OptionalTensor& shift, NormMask mask) {
  check_group_norm_mish("group_norm_mish", input, num_groups, weight, bias, eps, scale, shift);
  check_same("group_norm_mish_backward", "grad", grad_, "input", input);
  const c10::cuda::CUDAGuard guard(input.device());
  const Launch in(input, num_groups, weight, bias, eps, scale, shift, Tensor());
  const auto grad = grad_.contiguous();
  const auto type = input.scalar_type();
  auto grad_input = mask[0] ? at::empty_like(in.input) : Tensor();
  auto sums = at::empty({4, input.size(0), input.size(1)}, input.options().dtype(accumulate_type(type)));
  const kernels::GroupNormMishBackward args{in.args, grad.const_data_ptr(), mutable_data_or_null(grad_input),
                                            sums.mutable_data_ptr()};
  C10_CUDA_CHECK(kernels::group_norm_mish_backward(args, c10::cuda::getCurrentCUDAStream()));
  const auto over_batch = [&](int i, int slot) { return mask[slot] ? sums.select(0, i).sum(0).to(type) : Tensor(); };
  const auto per_sample = [&](int i, int slot) {
    return mask[slot] ? sums.select(0, i).to(type, /*non_blocking=*/false, /*copy=*/true) : Tensor();
  };
  return {grad_input, over_batch(0, 1), over_batch(1, 2), per_sample(2, 3), per_sample(3, 4)};
}

Tensor checked_group_norm_mish_cuda(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                                    const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                                    const OptionalTensor& shift) {
  check_group_norm_mish("group_norm_mish", input, num_groups, weight, bias, eps, scale, shift);
  return group_norm_mish_cuda(input, num_groups, weight, bias, eps, scale, shift);
}

}  // namespace

Tensor group_norm_mish_cuda(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                            const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                            const OptionalTensor& shift) {
  const c10::cuda::CUDAGuard guard(input.device());
  auto out = at::empty(input.sizes(), input.options());
  const Launch in(input, num_groups, weight, bias, eps, scale, shift, out);
  C10_CUDA_CHECK(kernels::group_norm_mish(in.args, c10::cuda::getCurrentCUDAStream()));
  return out;
}

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("group_norm_mish", &checked_group_norm_mish_cuda);
  m.impl("group_norm_mish_backward", &group_norm_mish_backward_cuda);
}

}  // namespace dpa
