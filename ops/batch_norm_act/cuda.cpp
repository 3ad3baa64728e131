// Channels-last images of 16 bits or float32 have kernels (kernels/cuda/batch_norm_act/); everything else is ATen's.
#include "ops/common/cuda.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/cuda/batch_norm_act/batch_norm_act.h"
#include "ops/batch_norm_act/batch_norm_act.h"
#include "ops/common/strides.h"

namespace dpa {
namespace {

/// The launcher's arguments, and the tensors that they point into.
struct BatchNormLaunch {
  Tensor input, weight, bias, residual, mean, var, partials;
  at::ScalarType parameter;  // the dtype in which the kernels take weight and bias
  kernels::BatchNormAct args;

  BatchNormLaunch(const Tensor& input_, const OptionalTensor& weight_, const OptionalTensor& bias_, double eps,
                  const OptionalTensor& residual_, bool relu) {
    const auto type = input_.scalar_type();
    if (!is_channels_last_image(input_) || input_.numel() == 0 || type == at::kDouble) return;
    args.shape = {input_.size(1), input_.size(0) * input_.size(2) * input_.size(3)};
    args.plan = kernels::batch_norm_act_plan(args.shape, static_cast<int>(input_.element_size()),
                                             kernels::batch_norm_act_device());
    if (!args.plan.fits()) return;
    const auto narrow = [&](const OptionalTensor& t) { return !t.has_value() || t->scalar_type() == type; };
    parameter = narrow(weight_) && narrow(bias_) ? type : at::kFloat;
    const auto vector = [&](const OptionalTensor& t) {
      return t.has_value() ? t->to(parameter).contiguous() : Tensor();
    };
    input = aligned(input_), weight = vector(weight_), bias = vector(bias_);
    if (residual_.has_value()) residual = aligned(image_in_order(*residual_, true));
    partials = at::empty({2, args.plan.slices, input.size(1)}, input.options().dtype(at::kFloat));
    args.dtype = kernel_dtype(type), args.parameter_dtype = kernel_dtype(parameter);
    args.eps = static_cast<float>(eps), args.relu = relu;
    args.input = input.const_data_ptr(), args.residual = data_or_null(residual);
    args.weight = data_or_null(weight), args.bias = data_or_null(bias);
    args.partials = partials.mutable_data_ptr<float>();
  }
  bool fits() const { return args.plan.fits(); }
  void take_statistics(const Tensor& mean_, const Tensor& var_) {
    mean = mean_, var = var_;
    args.mean = mean.mutable_data_ptr<float>(), args.var = var.mutable_data_ptr<float>();
  }
  Tensor image() const {
    const auto sizes = input.sizes();
    return empty_image(sizes[0], sizes[1], sizes[2], sizes[3], true, input.options());
  }
};

BatchNormOutputs batch_norm_act_forward_cuda(const Tensor& input, const OptionalTensor& weight,
                                             const OptionalTensor& bias, double eps, const OptionalTensor& residual,
                                             bool relu) {
  check_batch_norm_act(input, weight, bias, eps, residual);
  const c10::cuda::CUDAGuard guard(input.device());
  BatchNormLaunch in(input, weight, bias, eps, residual, relu);
  if (!in.fits()) return batch_norm_act_by_aten(input, weight, bias, eps, residual, relu);
  const auto statistic = [&] { return at::empty({input.size(1)}, input.options().dtype(at::kFloat)); };
  in.take_statistics(statistic(), statistic());
  auto out = in.image();
  in.args.out = out.mutable_data_ptr();
  C10_CUDA_CHECK(kernels::batch_norm_act(in.args, c10::cuda::getCurrentCUDAStream()));
  return {out, in.mean, in.var};
}

Tensor batch_norm_act_cuda(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                           const OptionalTensor& residual, bool relu) {
  return std::get<0>(batch_norm_act_forward_cuda(input, weight, bias, eps, residual, relu));
}

BatchNormGradients batch_norm_act_backward_cuda(const Tensor& grad_, const Tensor& input, const Tensor& mean,
                                                const Tensor& var, const OptionalTensor& weight,
                                                const OptionalTensor& bias, double eps, const OptionalTensor& residual,
                                                bool relu, BatchNormMask mask) {
  check_batch_norm_act(input, weight, bias, eps, residual);
  check_batch_norm_act_backward(grad_, input, mean, var);
  const c10::cuda::CUDAGuard guard(input.device());
  BatchNormLaunch in(input, weight, bias, eps, residual, relu);
  if (!in.fits())
    return batch_norm_act_backward_by_aten(grad_, input, mean, var, weight, bias, eps, residual, relu, mask);
  in.take_statistics(mean.contiguous(), var.contiguous());
  const auto grad = aligned(image_in_order(grad_, true));
  const auto image = [&](int i) { return mask[i] ? in.image() : Tensor(); };
  const auto vector = [&](int i) {
    return mask[i] ? at::empty({input.size(1)}, input.options().dtype(in.parameter)) : Tensor();
  };
  auto grad_input = image(0), grad_weight = vector(1), grad_bias = vector(2), grad_residual = image(3);
  C10_CUDA_CHECK(kernels::batch_norm_act_backward(
      {in.args, grad.const_data_ptr(), mutable_data_or_null(grad_input), mutable_data_or_null(grad_weight),
       mutable_data_or_null(grad_bias), mutable_data_or_null(grad_residual)},
      c10::cuda::getCurrentCUDAStream()));
  if (mask[1]) grad_weight = grad_weight.to(weight->scalar_type());
  if (mask[2]) grad_bias = grad_bias.to(bias->scalar_type());
  return {grad_input, grad_weight, grad_bias, grad_residual};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("batch_norm_act", &batch_norm_act_cuda);
  m.impl("batch_norm_act_forward", &batch_norm_act_forward_cuda);
  m.impl("batch_norm_act_backward", &batch_norm_act_backward_cuda);
}

}  // namespace dpa
