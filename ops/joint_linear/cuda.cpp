#include "ops/common/cuda.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "kernels/conv1d/conv1d.h"
#include "kernels/conv1d/plan.h"
#include "ops/conv1d/products.h"
#include "ops/joint_linear/joint_linear.h"

namespace dpa {
namespace {

/// One convolution with one tap, whose time is the batch.
products::Conv1d geometry(const Tensor& input, int64_t outputs) {
  const int64_t batch = input.size(0), channels = input.size(1);
  return {kernel_dtype(input.scalar_type()),
          1,
          batch,
          outputs,
          batch,
          channels,
          /*taps=*/1,
          /*stride=*/1,
          /*padding=*/0};
}

/// Every weight's rows to their place among all rows.
void pack(at::TensorList weights_, const Tensor& packed) {
  std::vector<Tensor> weights;
  for (const auto& weight : weights_) weights.push_back(weight.contiguous());
  products::Packings packings{};
  auto* to = static_cast<uint16_t*>(packed.mutable_data_ptr());
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto& weight = weights[i];
    if (weight.numel() > 0)
      packings.each[packings.count++] = {weight.const_data_ptr(), to, weight.size(0), weight.size(1), /*taps=*/1};
    to += weight.size(0) * packed.size(1);
    if (packings.count < products::kMaxPackings && i + 1 < weights.size()) continue;
    if (packings.count > 0)
      C10_CUDA_CHECK(products::pack_weights(kernel_dtype(weight.scalar_type()), kernel_dtype(packed.scalar_type()),
                                            packings, c10::cuda::getCurrentCUDAStream()));
    packings.count = 0;
  }
}

JointLinearForward joint_linear_forward_cuda(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  check_joint_linear(input, weights, biases);
  const c10::cuda::CUDAGuard guard(input.device());
  if (!joint_linear_packs(input, weights))
    return {joint_linear_formula(input, weights, biases), at::empty({0}, input.options())};
  const int64_t outputs = joint_outputs(weights).expect_int();
  auto packed = at::empty({outputs, products::padded(input.size(1))}, input.options());
  const auto conv = geometry(input, outputs);
  if (!takes_products(conv)) return {joint_linear_formula(input, weights, biases), packed};
  pack(weights, packed);
  const auto x = padded_rows(as_sample(input));
  const auto bias = biases.size() == 1 ? aligned(biases[0].contiguous()) : at::cat(biases);
  auto out = at::empty({input.size(0), outputs}, input.options());
  C10_CUDA_CHECK(products::gather(conv, x.const_data_ptr(), {packed.const_data_ptr(), /*settled=*/false},
                                  {bias.const_data_ptr(), kernel_dtype(bias.scalar_type()), nullptr},
                                  out.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream()));
  return {out, packed};
}

Tensor joint_linear_cuda(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  return std::get<0>(joint_linear_forward_cuda(input, weights, biases));
}

JointLinearGradients joint_linear_backward_cuda(const Tensor& grad, const Tensor& input, at::TensorList weights,
                                                at::TensorList biases, const Tensor& packed, JointLinearMask mask) {
  check_joint_linear(input, weights, biases);
  check_joint_linear_grad(grad, input, weights);
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t batch = input.size(0), outputs = joint_outputs(weights).expect_int();
  const auto conv = geometry(input, outputs);
  if (!joint_linear_packs(input, weights) || (mask[0] && packed.numel() == 0) || !takes_products(conv))
    return joint_linear_backward_formula(grad, input, weights, biases, mask);
  const auto g = padded_rows(as_sample(grad)), x = mask[1] ? padded_rows(as_sample(input)) : Tensor();
  LayerGradients to;
  if (mask[0]) to.input = at::empty({batch, input.size(1)}, input.options());
  if (mask[1]) to.weight = at::empty({outputs, input.size(1)}, weights[0].options());
  if (mask[2]) to.bias = at::empty({outputs}, biases[0].options());
  layer_backward(conv, /*transposed=*/false, g, x, packed, to);
  return {to.input, to.weight, to.bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("joint_linear", &joint_linear_cuda);
  m.impl("joint_linear_forward", &joint_linear_forward_cuda);
  m.impl("joint_linear_backward", &joint_linear_backward_cuda);
}

}  // namespace dpa
