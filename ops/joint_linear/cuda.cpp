#include "ops/common/cuda.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "kernels/conv1d/conv1d.h"
#include "kernels/conv1d/plan.h"
#include "ops/conv1d/conv1d.h"
#include "ops/conv1d/products.h"
#include "ops/joint_linear/joint_linear.h"

namespace dpa {
namespace {

/// (N, C) as one sample of length N, which is channels-last in memory.
Tensor as_sample(const Tensor& rows) { return rows.t().unsqueeze(0); }

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

bool serves(const Tensor& input, at::TensorList weights, const products::Conv1d& conv) {
  return conv1d_packs(as_sample(input), weights[0].unsqueeze(2), 1, 0) && takes_products(conv);
}

/// Every weight's rows at their place among all rows, in the input's dtype: (sum of C_i, C_in padded).
Tensor pack(const Tensor& input, at::TensorList weights_, int64_t outputs) {
  auto packed = at::empty({outputs, products::padded(input.size(1))}, input.options());
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
  return packed;
}

Tensor joint_linear_cuda(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  check_joint_linear(input, weights, biases);
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t outputs = joint_outputs(weights).expect_int();
  const auto conv = geometry(input, outputs);
  if (!serves(input, weights, conv)) return joint_linear_formula(input, weights, biases);
  const auto packed = pack(input, weights, outputs), x = padded_rows(as_sample(input));
  const auto bias = biases.size() == 1 ? aligned(biases[0].contiguous()) : at::cat(biases);
  auto out = at::empty({input.size(0), outputs}, input.options());
  C10_CUDA_CHECK(products::gather(conv, x.const_data_ptr(), {packed.const_data_ptr(), /*settled=*/false},
                                  {bias.const_data_ptr(), kernel_dtype(bias.scalar_type()), nullptr},
                                  out.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream()));
  return out;
}

JointLinearGradients joint_linear_backward_cuda(const Tensor& grad, const Tensor& input, at::TensorList weights,
                                                at::TensorList biases, JointLinearMask mask) {
  check_joint_linear(input, weights, biases);
  check_joint_linear_grad(grad, input, weights);
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t outputs = joint_outputs(weights).expect_int();
  const auto conv = geometry(input, outputs);
  if (!serves(input, weights, conv)) return joint_linear_backward_formula(grad, input, weights, biases, mask);
  const auto g = padded_rows(as_sample(grad)), x = mask[1] ? padded_rows(as_sample(input)) : Tensor();
  Tensor grad_input, grad_weight, grad_bias;
  const auto place_parameters = [&] {
    if (mask[1]) grad_weight = at::empty({outputs, input.size(1)}, weights[0].options());
    if (mask[2]) grad_bias = at::empty({outputs}, biases[0].options());
  };
  Branches branches;
  // What a branch writes is no memory that has become free since the fork. On one stream it may be: the packed weights,
  // half as large as their gradients, go before those come.
  if (branches.apart()) place_parameters();
  branches.fork();
  if (mask[0]) {
    grad_input = at::empty(input.sizes(), input.options());
    const auto packed = pack(input, weights, outputs);
    input_backward(conv, /*transposed=*/false, g, {packed.const_data_ptr(), /*settled=*/false}, grad_input);
  }
  if (!branches.apart()) place_parameters();
  parameter_backward(conv, /*transposed=*/false, g, x, grad_weight, grad_bias, branches.side());
  branches.join();
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("joint_linear", &joint_linear_cuda);
  m.impl("joint_linear_backward", &joint_linear_backward_cuda);
}

}  // namespace dpa
