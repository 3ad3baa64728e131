#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common/strides.h"
#include "ops/conv1d/conv1d.h"
#include "ops/residual_block1d/residual_block1d.h"

namespace dpa {

namespace {

bool all_weights(const ResidualBlock& block, decltype(conv1d_packs) takes) {
  const auto taken = [&](BlockSlot weight) {
    // Padding is less than the taps, whatever their number.
    return takes(block[kInput], block[weight], /*stride=*/1, /*padding=*/0) &&
           block[weight].scalar_type() == block[kConv1Weight].scalar_type();
  };
  if (block[kInput].device().type() != at::kCUDA) return false;
  return taken(kConv1Weight) && taken(kConv2Weight) && (!block[kResidualWeight].defined() || taken(kResidualWeight));
}

}  // namespace

bool block_packs(const ResidualBlock& block) { return all_weights(block, conv1d_packs); }

bool block_in_tf32(const ResidualBlock& block) { return all_weights(block, conv1d_in_tf32); }

c10::SymInt packed_size(const Tensor& weight) {
  return weight.sym_size(2) * weight.sym_size(0) * ((weight.sym_size(1) + 7) / 8 * 8);
}

c10::SymInt packed1_size(const ResidualBlock& block) {
  const auto size = packed_size(block[kConv1Weight]);
  return block[kResidualWeight].defined() ? size + packed_size(block[kResidualWeight]) : size;
}

namespace {

/// An activation of the block, in the order of its input.
Tensor activation_like(const ResidualBlock& block) {
  const Tensor& input = block[kInput];
  return empty_in_order(input.sym_size(0), block[kConv1Weight].sym_size(0), input.sym_size(2), is_channels_last(input),
                        input.options());
}

Tensor residual_block1d_meta(DPA_BLOCK_PARAMETERS) {
  const auto block = DPA_BLOCK;
  check_residual_block1d(block);
  return activation_like(block);
}

BlockForward residual_block1d_forward_meta(DPA_BLOCK_PARAMETERS) {
  const auto block = DPA_BLOCK;
  check_residual_block1d(block);
  const bool packs = block_packs(block);
  const auto packed = [&](const c10::SymInt& size) {
    return at::empty_symint({packs ? size : c10::SymInt(0)}, input.options());
  };
  return {activation_like(block), activation_like(block),      activation_like(block),
          activation_like(block), packed(packed1_size(block)), packed(packed_size(conv2_weight))};
}

BlockGradientTuple residual_block1d_backward_meta(const Tensor& grad, DPA_BLOCK_PARAMETERS, const Tensor& conv1,
                                                  const Tensor& activation, const Tensor& conv2, const Tensor& packed1,
                                                  const Tensor& packed2, BlockMask mask) {
  const auto block = DPA_BLOCK;
  check_residual_block1d(block);
  check_block_saved(block, grad, {conv1, activation, conv2, packed1, packed2});
  BlockGradients to;
  for (size_t i = 0; i < kBlockSlots; ++i)
    if (mask[i]) to[i] = at::empty_symint(block.tensors[i].sym_sizes(), block.tensors[i].options());
  for (const auto slot : {kInput, kSkip})
    if (mask[slot])
      to[slot] = empty_in_order(input.sym_size(0), block[slot].sym_size(1), input.sym_size(2), is_channels_last(input),
                                input.options());
  return as_tuple(std::move(to));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("residual_block1d", &residual_block1d_meta);
  m.impl("residual_block1d_forward", &residual_block1d_forward_meta);
  m.impl("residual_block1d_backward", &residual_block1d_backward_meta);
}

}  // namespace dpa
