#include <torch/library.h>

#include "ops/common/autocast.h"
#include "ops/common/last_use.h"
#include "ops/common/later_join.h"
#include "ops/common/node.h"
#include "ops/residual_block1d/residual_block1d.h"

namespace dpa {
namespace {

/// Saves the op's tensors, then what its forward kept.
struct ResidualBlock1dBackward : SavingNode<ResidualBlock1dBackward, kBlockSlots + 5, int64_t, double> {
  std::string name() const override { return "ResidualBlock1dBackward"; }
  static constexpr size_t kLent = kBlockSlots + 4;  // packed2

  static variable_list backward(const variable_list& gradients, Saved& saved, const Wanted& wanted, int64_t num_groups,
                                double eps) {
    if (!gradients[0].defined()) return variable_list(kBlockSlots);
    const auto mask = mask_of<BlockMask>(saved, wanted);
    const auto t = [&](size_t i) { return as_optional(saved[i]); };
    // The gradient of conv1_weight may lie where the weights of the second convolution were.
    Tensor& packed2 = saved[kLent];
    const LastUse lent(packed2);
    const LaterJoin later(gradients[0]);
    return as_list(residual_block1d_backward(
        gradients[0], saved[kInput], saved[kConv1Weight], saved[kConv1Bias], saved[kGn1Weight], saved[kGn1Bias],
        saved[kConv2Weight], saved[kConv2Bias], saved[kGn2Weight], saved[kGn2Bias], t(kResidualWeight),
        t(kResidualBias), num_groups, eps, t(kScale), t(kShift), t(kSkip), saved[kBlockSlots], saved[kBlockSlots + 1],
        saved[kBlockSlots + 2], saved[kBlockSlots + 3], packed2, mask));
  }
};

Tensor residual_block1d_autograd(DPA_BLOCK_PARAMETERS) {
  const auto block = DPA_BLOCK;
  const auto& tensors = block.tensors;
  if (std::apply([](const auto&... t) { return any_tangent(t...); }, tensors))
    return std::get<0>(residual_block1d_of_ops(block));
  const auto node = std::apply([](const auto&... t) { return node_if_wanted<ResidualBlock1dBackward>(t...); }, tensors);
  if (!node) return below_autograd(residual_block1d, DPA_BLOCK_ARGUMENTS);
  node->constants = {num_groups, eps};
  const auto [out, conv1, activation, conv2, packed1, packed2] =
      below_autograd(residual_block1d_forward, DPA_BLOCK_ARGUMENTS);
  const auto saved = std::tie(conv1, activation, conv2, packed1, packed2);
  std::apply([&](const auto&... t) { node->save(t...); }, std::tuple_cat(tensors, saved));
  return with_history(out, node);
}

/// Below the block's own node only a transform around it (torch.func) wants derivatives.
BlockForward residual_block1d_forward_formula(DPA_BLOCK_PARAMETERS) { return residual_block1d_of_ops(DPA_BLOCK); }

/// What the forward kept is constant to autograd, so it is computed again, differentiably.
BlockGradientTuple residual_block1d_backward_formula(const Tensor& grad, DPA_BLOCK_PARAMETERS, const Tensor&,
                                                     const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                     BlockMask mask) {
  const auto block = DPA_BLOCK;
  const auto [out, conv1, activation, conv2, none1, none2] = residual_block1d_of_ops(block);
  return as_tuple(residual_block1d_backward_of_ops(grad, block, {conv1, activation, conv2, none1, none2}, mask));
}

/// Under autocast the activations come in the region's 16-bit dtype; parameters stay as they are.
Tensor residual_block1d_autocast(const Autocast& cast, DPA_BLOCK_PARAMETERS) {
  const auto x = cast(input);
  const auto keep = [&](const auto& parameter) { return cast.parameter(parameter, x); };
  return residual_block1d(x, keep(conv1_weight), keep(conv1_bias), keep(gn1_weight), keep(gn1_bias), keep(conv2_weight),
                          keep(conv2_bias), keep(gn2_weight), keep(gn2_bias), keep(residual_weight),
                          keep(residual_bias), num_groups, eps, cast(scale), cast(shift), cast(skip));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("residual_block1d", &residual_block1d_autograd);
  m.impl("residual_block1d_forward", formula_autograd<residual_block1d_forward, &residual_block1d_forward_formula>);
  m.impl("residual_block1d_backward", formula_autograd<residual_block1d_backward, &residual_block1d_backward_formula>);
}

DPA_AUTOCAST(residual_block1d, With<residual_block1d_autocast>)

}  // namespace dpa
