#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "ops/common/autocast.h"
#include "ops/common/node.h"
#include "ops/max_pool2d/max_pool2d.h"

namespace dpa {
namespace {

/// Saves what stands for the input: its shape and dtype, and one element.
struct MaxPool2dBackward : SavingNode<MaxPool2dBackward, 2, int64_t, int64_t, int64_t> {
  std::string name() const override { return "MaxPool2dBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted,
                                int64_t kernel_size, int64_t stride, int64_t padding) {
    const auto& [input, taps] = saved;
    if (!gradients[0].defined() || !wanted[0]) return variable_list(1);
    return {max_pool2d_backward(gradients[0], taps, input, kernel_size, stride, padding)};
  }
};

MaxPool2dOutputs max_pool2d_forward_autograd(const Tensor& input, int64_t kernel_size, int64_t stride,
                                             int64_t padding) {
  if (any_tangent(input)) return max_pool2d_forward_formula(input, kernel_size, stride, padding);
  const auto node = node_if_wanted<MaxPool2dBackward>(input);
  auto outputs = below_autograd(max_pool2d_forward, input, kernel_size, stride, padding);
  if (node) {
    const std::array<c10::SymInt, 4> strides{};
    node->save(at::empty_strided_symint(input.sym_sizes(), strides, input.options()), std::get<1>(outputs));
    node->constants = {kernel_size, stride, padding};
    torch::autograd::set_history(std::get<0>(outputs), node);
  }
  return outputs;
}

Tensor max_pool2d_autograd(const Tensor& input, int64_t kernel_size, int64_t stride, int64_t padding) {
  if (any_tangent(input) || any_gradient(input))
    return std::get<0>(max_pool2d_forward_autograd(input, kernel_size, stride, padding));
  return below_autograd(max_pool2d, input, kernel_size, stride, padding);
}

/// As it comes: a maximum is exact in every dtype.
Tensor max_pool2d_autocast(const Autocast& /*cast*/, const Tensor& input, int64_t kernel_size, int64_t stride,
                           int64_t padding) {
  return max_pool2d(input, kernel_size, stride, padding);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("max_pool2d", &max_pool2d_autograd);
  m.impl("max_pool2d_forward", &max_pool2d_forward_autograd);
  m.impl("max_pool2d_backward", formula_autograd<max_pool2d_backward, &max_pool2d_backward_formula>);
}

DPA_AUTOCAST(max_pool2d, With<max_pool2d_autocast>)

}  // namespace dpa
