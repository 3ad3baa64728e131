// The parameters of a block as the kernels of kernels/cuda/conv1d read them: where the packed form of each weight lies, and
// vectors without strides. Only files built with CUDA include this.
#pragma once
#include "ops/conv1d/gemm.h"
#include "ops/residual_block1d/residual_block1d.h"

namespace dpa {

/// Where the packed form of each weight lies; of those that are read in place, nothing is there.
struct WeightPlaces {
  void *conv1, *conv2, *residual;

  void* operator[](BlockSlot weight) const {
    return weight == kConv1Weight ? conv1 : weight == kConv2Weight ? conv2 : residual;
  }
};
/// Behind the first `elements` of a packed tensor.
inline void* behind(const Tensor& packed, int64_t elements) {
  return static_cast<char*>(packed.mutable_data_ptr()) + elements * packed.element_size();
}
/// Whether a training pass reads the weight as it lies in the parameter.
inline bool reads_in_place(const ResidualBlock& block, BlockSlot weight) {
  const Tensor& input = block[kInput];
  return reads_in_place(same_length(block[weight], input.scalar_type(), input.size(0), input.size(2)), block[weight]);
}
/// Elements of the packed form of a weight; `transposed`: as data gradients of float32 read it.
inline int64_t packed_size(const ResidualBlock& block, BlockSlot slot, bool transposed = false) {
  const Tensor& weight = block[slot];
  if (!weight.defined() || reads_in_place(block, slot)) return 0;
  const int64_t parts = weight_parts(weight, block[kInput].scalar_type());
  if (!transposed) return parts * packed_size(weight).expect_int();
  return parts * weight.size(2) * weight.size(1) * gemm::padded(weight.size(0));
}
/// The same of the first and the residual convolution's, and of the second one's.
inline std::array<int64_t, 2> packed_sizes(const ResidualBlock& block, bool transposed) {
  const auto size = [&](BlockSlot slot) { return packed_size(block, slot, transposed); };
  return {size(kConv1Weight) + size(kResidualWeight), size(kConv2Weight)};
}
inline WeightPlaces places(const ResidualBlock& block, const Tensor& packed1, const Tensor& packed2,
                           bool transposed = false) {
  return {packed1.mutable_data_ptr(), packed2.mutable_data_ptr(),
          behind(packed1, packed_size(block, kConv1Weight, transposed))};
}
/// All in one, in the order of the block's arguments, none read in place.
inline WeightPlaces places(const ResidualBlock& block, const Tensor& packed) {
  const auto size = [&](BlockSlot slot) {
    return weight_parts(block[slot], packed.scalar_type()) * packed_size(block[slot]).expect_int();
  };
  return {packed.mutable_data_ptr(), behind(packed, size(kConv1Weight)),
          behind(packed, size(kConv1Weight) + size(kConv2Weight))};
}

inline constexpr BlockSlot kBlockWeights[] = {kConv1Weight, kConv2Weight, kResidualWeight};
inline constexpr BlockSlot kBlockVectors[] = {kConv1Bias, kConv2Bias, kResidualBias, kGn1Weight,
                                              kGn1Bias,   kGn2Weight, kGn2Bias};

/// The block with its vectors as the kernels read them.
inline ResidualBlock with_plain_vectors(ResidualBlock block) {
  for (const auto slot : kBlockVectors)
    if (block[slot].defined()) block.tensors[slot] = aligned(block[slot].contiguous());
  return block;
}
/// The block with contiguous weights. Branches that pack them have yet to fork.
inline ResidualBlock with_contiguous_weights(ResidualBlock block) {
  for (const auto slot : kBlockWeights)
    if (block[slot].defined()) block.tensors[slot] = block[slot].contiguous();
  return block;
}

/// Packs all weights, of any strides.
inline void pack_weights(const ResidualBlock& block, const WeightPlaces& packed) {
  gemm::Packings packings{};
  std::vector<Tensor> kept;
  for (const auto slot : kBlockWeights) {
    if (!block[slot].defined() || block[slot].numel() == 0) continue;
    kept.push_back(block[slot].contiguous());
    packings.each[packings.count++] = packing(kept.back(), packed[slot], block[kInput].scalar_type());
  }
  if (packings.count > 0)
    C10_CUDA_CHECK(gemm::pack_weights(kernel_dtype(block[kConv1Weight].scalar_type()),
                                      kernel_dtype(block[kInput].scalar_type()), packings,
                                      c10::cuda::getCurrentCUDAStream()));
}

}  // namespace dpa
