#include <torch/library.h>

#include "ops/common/last_use.h"
#include "ops/common/node.h"
#include "ops/residual_block1d/residual_block1d.h"

namespace dpa {

Tensor residual_block1d(DPA_BLOCK_PARAMETERS) {
  static const auto op = find_op<decltype(residual_block1d)>("dpa::residual_block1d");
  return op.call(DPA_BLOCK_ARGUMENTS);
}

BlockForward residual_block1d_forward(DPA_BLOCK_PARAMETERS) {
  static const auto op = find_op<decltype(residual_block1d_forward)>("dpa::residual_block1d_forward");
  return op.call(DPA_BLOCK_ARGUMENTS);
}

BlockGradientTuple residual_block1d_backward(const Tensor& grad, DPA_BLOCK_PARAMETERS, const Tensor& conv1,
                                             const Tensor& activation, const Tensor& conv2, const Tensor& packed1,
                                             const Tensor& packed2, BlockMask output_mask) {
  static const auto op = find_op<decltype(residual_block1d_backward)>("dpa::residual_block1d_backward");
  return op.call(grad, DPA_BLOCK_ARGUMENTS, conv1, activation, conv2, packed1, packed2, output_mask);
}

namespace {

bool has_tangent(const ResidualBlock& block) {
  return std::apply([](const auto&... tensors) { return any_tangent(tensors...); }, block.tensors);
}
bool requires_grad(const ResidualBlock& block) {
  return std::apply([](const auto&... tensors) { return torch::autograd::compute_requires_grad(tensors...); },
                    block.tensors);
}

/// Saves the op's tensors, then what its forward kept.
struct ResidualBlock1dBackward : SavingNode<ResidualBlock1dBackward, kBlockSlots + 5, int64_t, double> {
  std::string name() const override { return "ResidualBlock1dBackward"; }
  static constexpr size_t kLent = kBlockSlots + 4;  // packed2

  static variable_list backward(const variable_list& gradients, Saved& saved, const Wanted& wanted, int64_t num_groups,
                                double eps) {
    if (!gradients[0].defined()) return variable_list(kBlockSlots);
    BlockMask mask;
    for (size_t i = 0; i < kBlockSlots; ++i) mask[i] = saved[i].defined() && wanted[i];
    const auto t = [&](size_t i) { return as_optional(saved[i]); };
    // The gradient of conv1_weight may lie where the weights of the second convolution were.
    Tensor& packed2 = saved[kLent];
    const LastUse lent(packed2);
    auto to = residual_block1d_backward(
        gradients[0], saved[kInput], saved[kConv1Weight], saved[kConv1Bias], saved[kGn1Weight], saved[kGn1Bias],
        saved[kConv2Weight], saved[kConv2Bias], saved[kGn2Weight], saved[kGn2Bias], t(kResidualWeight),
        t(kResidualBias), num_groups, eps, t(kScale), t(kShift), saved[kBlockSlots], saved[kBlockSlots + 1],
        saved[kBlockSlots + 2], saved[kBlockSlots + 3], packed2, mask);
    return std::apply([](auto&... tensors) { return variable_list{std::move(tensors)...}; }, to);
  }
};

Tensor residual_block1d_autograd(DPA_BLOCK_PARAMETERS) {
  const auto block = DPA_BLOCK;
  if (has_tangent(block)) return std::get<0>(residual_block1d_of_ops(block));
  if (!requires_grad(block)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return residual_block1d(DPA_BLOCK_ARGUMENTS);
  }
  auto node = std::apply([](const auto&... t) { return make_node<ResidualBlock1dBackward>(t...); }, block.tensors);
  node->constants = {num_groups, eps};
  Tensor out, conv1, activation, conv2, packed1, packed2;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(out, conv1, activation, conv2, packed1, packed2) = residual_block1d_forward(DPA_BLOCK_ARGUMENTS);
  }
  std::apply([&](const auto&... t) { node->save(t..., conv1, activation, conv2, packed1, packed2); }, block.tensors);
  torch::autograd::set_history(out, node);
  return out;
}

/// Below the block's own node only a transform around it (torch.func) asks for derivatives.
BlockForward residual_block1d_forward_autograd(DPA_BLOCK_PARAMETERS) {
  const auto block = DPA_BLOCK;
  if (requires_grad(block) || has_tangent(block)) return residual_block1d_of_ops(block);
  at::AutoDispatchBelowADInplaceOrView guard;
  return residual_block1d_forward(DPA_BLOCK_ARGUMENTS);
}

BlockGradientTuple residual_block1d_backward_autograd(const Tensor& grad, DPA_BLOCK_PARAMETERS, const Tensor& conv1,
                                                      const Tensor& activation, const Tensor& conv2,
                                                      const Tensor& packed1, const Tensor& packed2, BlockMask mask) {
  const auto block = DPA_BLOCK;
  if (requires_grad(block) || grad.requires_grad() || has_tangent(block) || any_tangent(grad)) {
    // What the forward kept is constant to autograd, so it is computed again, differentiably.
    const auto [out, again1, again, again2, none1, none2] = residual_block1d_of_ops(block);
    return as_tuple(residual_block1d_backward_of_ops(grad, block, {again1, again, again2, none1, none2}, mask));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return residual_block1d_backward(grad, DPA_BLOCK_ARGUMENTS, conv1, activation, conv2, packed1, packed2, mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("residual_block1d", &residual_block1d_autograd);
  m.impl("residual_block1d_forward", &residual_block1d_forward_autograd);
  m.impl("residual_block1d_backward", &residual_block1d_backward_autograd);
}

}  // namespace dpa
