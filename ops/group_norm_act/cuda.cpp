// Channels-last images of 16 bits or float32 have kernels (kernels/cuda/group_norm_act/); everything else is ATen's.
#include "ops/common/cuda.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/cuda/common/clusters.h"
#include "kernels/cuda/group_norm_act/group_norm_act.h"
#include "kernels/cuda/group_norm_mish/channels_last.h"
#include "ops/common/strides.h"
#include "ops/conv1d/branches.h"
#include "ops/group_norm_act/group_norm_act.h"
#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

/// The launcher's arguments, and the tensors that they point into.
struct NormActLaunch {
  Tensor input, weight, bias, residual;
  at::ScalarType parameter;  // the dtype in which the kernels take weight and bias
  kernels::GroupNormAct args;

  NormActLaunch(const Tensor& input_, int64_t num_groups, const OptionalTensor& weight_, const OptionalTensor& bias_,
                double eps, const OptionalTensor& residual_, bool relu) {
    const auto type = input_.scalar_type();
    if (!is_channels_last_image(input_) || input_.numel() == 0 || type == at::kDouble) return;
    args.shape = {input_.size(0), input_.size(1), input_.size(2) * input_.size(3), num_groups};
    args.plan =
        kernels::group_norm_act_plan(args.shape, static_cast<int>(input_.element_size()), kernels::has_clusters());
    if (!args.plan.fits()) return;
    const auto narrow = [&](const OptionalTensor& t) { return !t.has_value() || t->scalar_type() == type; };
    parameter = narrow(weight_) && narrow(bias_) ? type : at::kFloat;
    const auto vector = [&](const OptionalTensor& t) {
      return t.has_value() ? t->to(parameter).contiguous() : Tensor();
    };
    input = aligned(input_), weight = vector(weight_), bias = vector(bias_);
    if (residual_.has_value()) residual = aligned(image_in_order(*residual_, true));
    args.dtype = kernel_dtype(type), args.parameter_dtype = kernel_dtype(parameter);
    args.eps = static_cast<float>(eps), args.relu = relu;
    args.input = input.const_data_ptr(), args.residual = data_or_null(residual);
    args.weight = data_or_null(weight), args.bias = data_or_null(bias);
  }
  bool fits() const { return args.plan.fits(); }
  Tensor image() const {
    const auto sizes = input.sizes();
    return empty_image(sizes[0], sizes[1], sizes[2], sizes[3], true, input.options());
  }
};

Tensor group_norm_act_cuda(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, const OptionalTensor& residual, bool relu) {
  check_group_norm_mish(group_norm_act.name(), input, num_groups, weight, bias, eps, {}, {}, residual);
  const c10::cuda::CUDAGuard guard(input.device());
  NormActLaunch in(input, num_groups, weight, bias, eps, residual, relu);
  if (!in.fits()) return group_norm_act_by_aten(input, num_groups, weight, bias, eps, residual, relu);
  auto out = in.image();
  in.args.out = out.mutable_data_ptr();
  C10_CUDA_CHECK(kernels::group_norm_act(in.args, c10::cuda::getCurrentCUDAStream()));
  return out;
}

NormActGradients group_norm_act_backward_cuda(const Tensor& grad_, const Tensor& input, int64_t num_groups,
                                              const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                              const OptionalTensor& residual, bool relu, NormActMask mask) {
  check_group_norm_mish(group_norm_act.name(), input, num_groups, weight, bias, eps, {}, {}, residual);
  check_same(group_norm_act_backward.name(), "grad", grad_, "input", input);
  const c10::cuda::CUDAGuard guard(input.device());
  const bool later = joins_later(grad_, 1, 3);
  const NormActLaunch in(input, num_groups, weight, bias, eps, residual, relu);
  if (!in.fits())
    return group_norm_act_backward_by_aten(grad_, input, num_groups, weight, bias, eps, residual, relu, mask);
  const auto grad = aligned(image_in_order(grad_, true));
  const int64_t batch = input.size(0), channels = input.size(1);
  const auto options = input.options();
  const auto image = [&](int i) { return mask[i] ? in.image() : Tensor(); };
  const auto vector = [&](int i) { return mask[i] ? at::empty({channels}, options.dtype(in.parameter)) : Tensor(); };
  auto grad_input = image(0), grad_weight = vector(1), grad_bias = vector(2), grad_residual = image(3),
       partials = Tensor();
  if (mask[1] || mask[2]) partials = at::empty({2, batch, channels}, options.dtype(at::kFloat));
  auto* const shares = partials.defined() ? partials.mutable_data_ptr<float>() : nullptr;
  Branches branches;
  C10_CUDA_CHECK(kernels::group_norm_act_backward(
      {in.args, grad.const_data_ptr(), mutable_data_or_null(grad_input), mutable_data_or_null(grad_residual), shares},
      branches.main()));
  if (partials.defined()) {
    const auto is_cast = [&](int i, const OptionalTensor& t) { return mask[i] && t->scalar_type() != in.parameter; };
    const bool apart = later && !is_cast(1, weight) && !is_cast(2, bias);
    if (apart) branches.fork();
    const kernels::channels_last::SliceSums sums{kernel_dtype(in.parameter),
                                                 channels,
                                                 batch,
                                                 shares,
                                                 2,
                                                 {mutable_data_or_null(grad_weight), mutable_data_or_null(grad_bias)}};
    C10_CUDA_CHECK(kernels::channels_last::add_slices(sums, apart ? branches.side() : branches.main()));
    if (apart) Unjoined::hold(branches, {partials}, {grad_weight, grad_bias});
  }
  if (mask[1]) grad_weight = grad_weight.to(weight->scalar_type());
  if (mask[2]) grad_bias = grad_bias.to(bias->scalar_type());
  return {grad_input, grad_weight, grad_bias, grad_residual};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("group_norm_act", &group_norm_act_cuda);
  m.impl("group_norm_act_backward", &group_norm_act_backward_cuda);
}

}  // namespace dpa
