#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common/autocast.h"
#include "ops/common/later_join.h"
#include "ops/common/node.h"
#include "ops/conv1d/conv1d.h"

namespace dpa {
namespace {

struct Conv1dBackward : SavingNode<Conv1dBackward, 4, int64_t, int64_t, bool> {
  std::string name() const override { return "Conv1dBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted,
                                int64_t stride, int64_t padding, bool transposed) {
    const auto& [input, weight, bias, packed] = saved;
    if (!gradients[0].defined()) return variable_list(3);
    const LaterJoin later(gradients[0]);
    return as_list(conv1d_backward(gradients[0], input, weight, as_optional(bias), packed, stride, padding, transposed,
                                   mask_of<Conv1dMask>(saved, wanted)));
  }
};

Tensor conv1d_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride,
                       int64_t padding, bool transposed) {
  if (any_tangent(input, weight, bias)) {
    check_conv1d("conv1d", input, weight, bias, stride, padding, transposed);
    return conv1d_formula(input, weight, bias, stride, padding, transposed);
  }
  const auto node = node_if_wanted<Conv1dBackward>(input, weight, bias);
  if (!node) return below_autograd(conv1d, input, weight, bias, stride, padding, transposed);
  node->constants = {stride, padding, transposed};
  const auto [out, packed] = below_autograd(conv1d_forward, input, weight, bias, stride, padding, transposed);
  node->save(input, weight, bias, packed);
  return with_history(out, node);
}

/// Below conv1d's own node only a transform around it (torch.func) wants derivatives: then it is the op once more,
/// which packs nothing.
Conv1dForward conv1d_forward_again(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                   int64_t stride, int64_t padding, bool transposed) {
  return {conv1d(input, weight, bias, stride, padding, transposed), at::empty({0}, input.options())};
}

Conv1dGradients conv1d_backward_again(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                      const OptionalTensor& bias, const Tensor& /*packed*/, int64_t stride,
                                      int64_t padding, bool transposed, Conv1dMask mask) {
  return conv1d_backward_formula(grad, input, weight, bias, stride, padding, transposed, mask);
}

/// Under autocast the input comes in the region's 16-bit dtype. Parameters stay as they are: the GEMMs cast them while
/// they pack them, and their gradients come back in the parameters' own precision.
Tensor conv1d_autocast(const Autocast& cast, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       int64_t stride, int64_t padding, bool transposed) {
  const auto narrow = cast(input);
  return conv1d(narrow, cast.parameter(weight, narrow), cast.parameter(bias, narrow), stride, padding, transposed);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("conv1d", &conv1d_autograd);
  m.impl("conv1d_forward", formula_autograd<conv1d_forward, &conv1d_forward_again>);
  m.impl("conv1d_backward", formula_autograd<conv1d_backward, &conv1d_backward_again>);
}

DPA_AUTOCAST(conv1d, With<conv1d_autocast>)

}  // namespace dpa
