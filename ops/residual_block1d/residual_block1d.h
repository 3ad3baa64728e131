// `dpa::residual_block1d`: the residual block of Diffusion Policy's U-Net as one op, since at its sizes the host spends
// longer on calling a dozen small ops than the GPU on their work.
//
//   input      = its own channels, then those of `skip`, if that is given
//   activation = group_norm_mish(conv1d(input, conv1), gn1) * scale + shift
//   out        = group_norm_mish(conv1d(activation, conv2), gn2) + (conv1d(input, residual) or input)
#pragma once
#include <array>

#include "ops/common/check.h"
#include "ops/common/op.h"

namespace dpa {

/// The op's tensors, in the order of its arguments; those that may be absent are undefined then.
enum BlockSlot : size_t {
  kInput,
  kConv1Weight,
  kConv1Bias,
  kGn1Weight,
  kGn1Bias,
  kConv2Weight,
  kConv2Bias,
  kGn2Weight,
  kGn2Bias,
  kResidualWeight,
  kResidualBias,
  kScale,
  kShift,
  kSkip,
  kBlockSlots
};
struct ResidualBlock {
  std::array<Tensor, kBlockSlots> tensors;
  int64_t num_groups;
  double eps;

  const Tensor& operator[](BlockSlot slot) const { return tensors[slot]; }
  OptionalTensor optional(BlockSlot slot) const { return as_optional(tensors[slot]); }
};

/// Output; what the backward reads again: output of the first convolution, activation, output of the second; and the
/// weights as the GEMMs of kernels/cuda/conv1d read them, or no elements where they do not run: those of the block's
/// input, one after the other, and those of the second convolution, which are read for the last time before the others.
using BlockForward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
struct BlockSaved {
  Tensor conv1, activation, conv2, packed1, packed2;
};
using BlockGradients = std::array<Tensor, kBlockSlots>;
using BlockMask = std::array<bool, kBlockSlots>;

void check_residual_block1d(const ResidualBlock& block);
/// Of a backward: its gradient, and what the forward kept. `packed2` may be gone (ops/common/last_use.h).
void check_block_saved(const ResidualBlock& block, const Tensor& grad, const BlockSaved& saved);

/// Whether the packed weights are made: a matter of dtypes, order, device and taps alone, so that the Meta kernel knows
/// it. Sizes that the GEMMs do not take fall back later; what has elements is packed even so, and a backward needs
/// no other word on it.
bool block_packs(const ResidualBlock& block);
/// Whether the GEMMs may take a float32 block in TF32: they pack its weights anew in each direction, or read them in place.
bool block_in_tf32(const ResidualBlock& block);
/// Elements of one packed weight, and of those of a block's input.
c10::SymInt packed_size(const Tensor& weight);
c10::SymInt packed1_size(const ResidualBlock& block);

/// The same block with input and skip as one tensor, and its backward's mask; the gradients of the two from that of the
/// one. All are differentiable.
ResidualBlock join_skip(ResidualBlock block);
BlockMask join_skip(BlockMask mask);
BlockGradients part_skip(BlockGradients gradients, const ResidualBlock& block, const BlockMask& mask);

/// The block and its backward made of this library's ops, differentiable where autograd is at work.
BlockForward residual_block1d_of_ops(const ResidualBlock& block);
BlockGradients residual_block1d_backward_of_ops(const Tensor& grad, const ResidualBlock& block, const BlockSaved& saved,
                                                const BlockMask& mask);

/// The op's schemas spell its tensors out.
#define DPA_BLOCK_PARAMETERS                                                                                  \
  const Tensor &input, const Tensor &conv1_weight, const Tensor &conv1_bias, const Tensor &gn1_weight,        \
      const Tensor &gn1_bias, const Tensor &conv2_weight, const Tensor &conv2_bias, const Tensor &gn2_weight, \
      const Tensor &gn2_bias, const OptionalTensor &residual_weight, const OptionalTensor &residual_bias,     \
      int64_t num_groups, double eps, const OptionalTensor &scale, const OptionalTensor &shift,               \
      const OptionalTensor &skip
#define DPA_BLOCK_ARGUMENTS                                                                              \
  input, conv1_weight, conv1_bias, gn1_weight, gn1_bias, conv2_weight, conv2_bias, gn2_weight, gn2_bias, \
      residual_weight, residual_bias, num_groups, eps, scale, shift, skip
#define DPA_BLOCK                         \
  ResidualBlock {                         \
    {input,                               \
     conv1_weight,                        \
     conv1_bias,                          \
     gn1_weight,                          \
     gn1_bias,                            \
     conv2_weight,                        \
     conv2_bias,                          \
     gn2_weight,                          \
     gn2_bias,                            \
     value_or_undefined(residual_weight), \
     value_or_undefined(residual_bias),   \
     value_or_undefined(scale),           \
     value_or_undefined(shift),           \
     value_or_undefined(skip)},           \
        num_groups, eps                   \
  }
using BlockGradientTuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                                      Tensor, Tensor, Tensor, Tensor>;

/// Through the dispatcher.
inline constexpr Op<"residual_block1d", Tensor(DPA_BLOCK_PARAMETERS)> residual_block1d;
inline constexpr Op<"residual_block1d_forward", BlockForward(DPA_BLOCK_PARAMETERS)> residual_block1d_forward;
inline constexpr Op<"residual_block1d_backward",
                    BlockGradientTuple(const Tensor& grad, DPA_BLOCK_PARAMETERS, const Tensor& conv1,
                                       const Tensor& activation, const Tensor& conv2, const Tensor& packed1,
                                       const Tensor& packed2, BlockMask output_mask)>
    residual_block1d_backward;

/// The block without gradients, on CUDA, on weights that were packed before, by an earlier kernel than the last, in the
/// order of its arguments. The caller has checked it; the channels of a channels-last input of 16 bits may be padded to
/// a multiple of 8, where there is no skip. Undefined where the kernels do not take it.
Tensor residual_block1d_on_packed(const ResidualBlock& block, const Tensor& packed);

inline BlockGradientTuple as_tuple(BlockGradients&& gradients) {
  return std::apply([](auto&... tensors) { return BlockGradientTuple(std::move(tensors)...); }, gradients);
}

}  // namespace dpa
