// The block made of this library's other ops: what forward-mode AD and second derivatives differentiate, and what runs
// wherever the block's own chain of kernels does not.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "ops/common/strides.h"
#include "ops/conv1d/conv1d.h"
#include "ops/conv1d_gnm/conv1d_gnm.h"
#include "ops/group_norm_mish/group_norm_mish.h"
#include "ops/residual_block1d/residual_block1d.h"

namespace dpa {
namespace {

Tensor convolve(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return conv1d(x, weight, as_optional(bias), 1, conv_padding(weight), /*transposed=*/false);
}

/// Some of the channels, as a tensor of its own in the order of another.
Tensor channels_of(const Tensor& x, const c10::SymInt& first, const c10::SymInt& count, bool channels_last) {
  const auto part = x.narrow_symint(1, first, count);
  return channels_last ? part.transpose(1, 2).clone(at::MemoryFormat::Contiguous).transpose(1, 2)
                       : part.clone(at::MemoryFormat::Contiguous);
}

}  // namespace

ResidualBlock join_skip(ResidualBlock block) {
  const Tensor input = block[kInput], skip = block[kSkip];
  if (!skip.defined()) return block;
  block.tensors[kInput] = is_channels_last(input)
                              ? at::cat({input.transpose(1, 2), skip.transpose(1, 2)}, 2).transpose(1, 2)
                              : at::cat({input, skip}, 1);
  block.tensors[kSkip] = Tensor();
  return block;
}

BlockMask join_skip(BlockMask mask) {
  mask[kInput] = mask[kInput] || mask[kSkip], mask[kSkip] = false;
  return mask;
}

BlockGradients part_skip(BlockGradients gradients, const ResidualBlock& block, const BlockMask& mask) {
  if (!block[kSkip].defined() || !gradients[kInput].defined()) return gradients;
  const Tensor both = gradients[kInput];
  const auto own = block[kInput].sym_size(1);
  const bool last = is_channels_last(block[kInput]);
  gradients[kInput] = mask[kInput] ? channels_of(both, 0, own, last) : Tensor();
  gradients[kSkip] = mask[kSkip] ? channels_of(both, own, block[kSkip].sym_size(1), last) : Tensor();
  return gradients;
}

BlockForward residual_block1d_of_ops(const ResidualBlock& given) {
  check_residual_block1d(given);
  const auto block = join_skip(given);
  const auto conv1 = convolve(block[kInput], block[kConv1Weight], block[kConv1Bias]);
  const auto activation = group_norm_mish(conv1, block.num_groups, block[kGn1Weight], block[kGn1Bias], block.eps,
                                          block.optional(kScale), block.optional(kShift), std::nullopt);
  const auto conv2 = convolve(activation, block[kConv2Weight], block[kConv2Bias]);
  const auto residual = block[kResidualWeight].defined()
                            ? convolve(block[kInput], block[kResidualWeight], block[kResidualBias])
                            : block[kInput];
  auto out = group_norm_mish(conv2, block.num_groups, block[kGn2Weight], block[kGn2Bias], block.eps, std::nullopt,
                             std::nullopt, residual);
  const auto none = [&] { return at::empty({0}, block[kInput].options()); };
  return {out, conv1, activation, conv2, none(), none()};
}

BlockGradients residual_block1d_backward_of_ops(const Tensor& grad, const ResidualBlock& given, const BlockSaved& saved,
                                                const BlockMask& wanted) {
  check_residual_block1d(given);
  const auto block = join_skip(given);
  const auto mask = join_skip(wanted);
  const auto none = at::empty({0}, block[kInput].options());  // packed weights
  const auto back = [&](const Tensor& g, const Tensor& x, BlockSlot weight, BlockSlot bias, bool of_input) {
    return conv1d_backward(g, x, block[weight], block.optional(bias), none, 1, conv_padding(block[weight]),
                           /*transposed=*/false, {of_input, mask[weight], mask[bias]});
  };
  const bool into_conv1 = mask[kInput] || mask[kConv1Weight] || mask[kConv1Bias];
  const bool into_gn1 = into_conv1 || mask[kGn1Weight] || mask[kGn1Bias] || mask[kScale] || mask[kShift];
  const bool into_conv2 = into_gn1 || mask[kConv2Weight] || mask[kConv2Bias];
  BlockGradients to;
  Tensor grad_conv2, grad_activation, grad_conv1, unused;
  if (into_conv2 || mask[kGn2Weight] || mask[kGn2Bias])
    std::tie(grad_conv2, to[kGn2Weight], to[kGn2Bias], unused, unused) = group_norm_mish_backward(
        grad, saved.conv2, block.num_groups, block[kGn2Weight], block[kGn2Bias], block.eps, std::nullopt, std::nullopt,
        {into_conv2, mask[kGn2Weight], mask[kGn2Bias], false, false});
  if (into_conv2)
    std::tie(grad_activation, to[kConv2Weight], to[kConv2Bias]) =
        back(grad_conv2, saved.activation, kConv2Weight, kConv2Bias, into_gn1);
  if (into_gn1)
    std::tie(grad_conv1, to[kGn1Weight], to[kGn1Bias], to[kScale], to[kShift]) =
        group_norm_mish_backward(grad_activation, saved.conv1, block.num_groups, block[kGn1Weight], block[kGn1Bias],
                                 block.eps, block.optional(kScale), block.optional(kShift),
                                 {into_conv1, mask[kGn1Weight], mask[kGn1Bias], mask[kScale], mask[kShift]});
  if (into_conv1)
    std::tie(to[kInput], to[kConv1Weight], to[kConv1Bias]) =
        back(grad_conv1, block[kInput], kConv1Weight, kConv1Bias, mask[kInput]);
  if (!block[kResidualWeight].defined()) {
    if (mask[kInput]) to[kInput] = to[kInput] + grad;
  } else if (mask[kInput] || mask[kResidualWeight] || mask[kResidualBias]) {
    Tensor through;
    std::tie(through, to[kResidualWeight], to[kResidualBias]) =
        back(grad, block[kInput], kResidualWeight, kResidualBias, mask[kInput]);
    if (mask[kInput]) to[kInput] = to[kInput] + through;
  }
  return part_skip(std::move(to), given, wanted);
}

}  // namespace dpa
