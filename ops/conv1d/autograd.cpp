#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common/node.h"
#include "ops/conv1d/conv1d.h"

namespace dpa {

Tensor conv1d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride, int64_t padding,
              bool transposed) {
  static const auto op = find_op<decltype(conv1d)>("dpa::conv1d");
  return op.call(input, weight, bias, stride, padding, transposed);
}

Conv1dForward conv1d_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride,
                             int64_t padding, bool transposed) {
  static const auto op = find_op<decltype(conv1d_forward)>("dpa::conv1d_forward");
  return op.call(input, weight, bias, stride, padding, transposed);
}

Conv1dGradients conv1d_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                const OptionalTensor& bias, const Tensor& packed, int64_t stride, int64_t padding,
                                bool transposed, Conv1dMask output_mask) {
  static const auto op = find_op<decltype(conv1d_backward)>("dpa::conv1d_backward");
  return op.call(grad, input, weight, bias, packed, stride, padding, transposed, output_mask);
}

namespace {

struct Conv1dBackward : SavingNode<Conv1dBackward, 4, int64_t, int64_t, bool> {
  std::string name() const override { return "Conv1dBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted,
                                int64_t stride, int64_t padding, bool transposed) {
    const auto& [input, weight, bias, packed] = saved;
    if (!gradients[0].defined()) return variable_list(3);
    Conv1dMask mask;
    for (size_t i = 0; i < mask.size(); ++i) mask[i] = saved[i].defined() && wanted[i];
    auto [g0, g1, g2] =
        conv1d_backward(gradients[0], input, weight, as_optional(bias), packed, stride, padding, transposed, mask);
    return {g0, g1, g2};
  }
};

Tensor conv1d_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias_, int64_t stride,
                       int64_t padding, bool transposed) {
  const auto bias = value_or_undefined(bias_);
  if (any_tangent(input, weight, bias)) {
    check_conv1d("conv1d", input, weight, bias_, stride, padding, transposed);
    return conv1d_formula(input, weight, bias_, stride, padding, transposed);
  }
  if (!torch::autograd::compute_requires_grad(input, weight, bias)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return conv1d(input, weight, bias_, stride, padding, transposed);
  }
  auto node = make_node<Conv1dBackward>(input, weight, bias);
  node->constants = {stride, padding, transposed};
  Tensor out, packed;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(out, packed) = conv1d_forward(input, weight, bias_, stride, padding, transposed);
  }
  node->save(input, weight, bias, packed);
  torch::autograd::set_history(out, node);
  return out;
}

/// Below conv1d's own node only a transform around it (torch.func) asks for derivatives: then it is the op once more,
/// which packs nothing.
Conv1dForward conv1d_forward_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias_,
                                      int64_t stride, int64_t padding, bool transposed) {
  const auto bias = value_or_undefined(bias_);
  if (torch::autograd::compute_requires_grad(input, weight, bias) || any_tangent(input, weight, bias))
    return {conv1d(input, weight, bias_, stride, padding, transposed), at::empty({0}, input.options())};
  at::AutoDispatchBelowADInplaceOrView guard;
  return conv1d_forward(input, weight, bias_, stride, padding, transposed);
}

Conv1dGradients conv1d_backward_autograd(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                         const OptionalTensor& bias_, const Tensor& packed, int64_t stride,
                                         int64_t padding, bool transposed, Conv1dMask output_mask) {
  const auto bias = value_or_undefined(bias_);
  if (torch::autograd::compute_requires_grad(grad, input, weight, bias) || any_tangent(grad, input, weight, bias))
    return conv1d_backward_formula(grad, input, weight, bias_, stride, padding, transposed, output_mask);
  at::AutoDispatchBelowADInplaceOrView guard;
  return conv1d_backward(grad, input, weight, bias_, packed, stride, padding, transposed, output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("conv1d", &conv1d_autograd);
  m.impl("conv1d_forward", &conv1d_forward_autograd);
  m.impl("conv1d_backward", &conv1d_backward_autograd);
}

}  // namespace dpa
