#include <torch/library.h>

#include "ops/common/autocast.h"
#include "ops/common/node.h"
#include "ops/conv2d/conv2d.h"

namespace dpa {
namespace {

struct Conv2dBackward : SavingNode<Conv2dBackward, 2, int64_t, int64_t> {
  std::string name() const override { return "Conv2dBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted,
                                int64_t stride, int64_t padding) {
    const auto& [input, weight] = saved;
    if (!gradients[0].defined()) return variable_list(2);
    return as_list(conv2d_backward(gradients[0], input, weight, stride, padding, mask_of<Conv2dMask>(saved, wanted)));
  }
};

Tensor conv2d_autograd(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding) {
  if (any_tangent(input, weight)) {
    check_conv2d("conv2d", input, weight, stride, padding);
    return conv2d_formula(input, weight, stride, padding);
  }
  const auto node = node_if_wanted<Conv2dBackward>(input, weight);
  const auto out = below_autograd(conv2d, input, weight, stride, padding);
  if (!node) return out;
  node->constants = {stride, padding};
  node->save(input, weight);
  return with_history(out, node);
}

/// Under autocast the input comes in the region's 16-bit dtype; a float32 weight stays, and so does its gradient.
Tensor conv2d_autocast(const Autocast& cast, const Tensor& input, const Tensor& weight, int64_t stride,
                       int64_t padding) {
  const auto narrow = cast(input);
  return conv2d(narrow, cast.parameter(weight, narrow), stride, padding);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("conv2d", &conv2d_autograd);
  m.impl("conv2d_backward", formula_autograd<conv2d_backward, &conv2d_backward_formula>);
}

DPA_AUTOCAST(conv2d, With<conv2d_autocast>)

}  // namespace dpa
