// The parameters of a block as the kernels of kernels/cuda/conv1d read them: where the packed form of each weight lies, and
// vectors without strides. Only files built with CUDA include this.
#pragma once
#include "ops/conv1d/gemm.h"
#include "ops/residual_block1d/residual_block1d.h"

namespace dpa {

/// Where the packed form of each weight lies.
struct WeightPlaces {
  void *conv1, *conv2, *residual;

  void* operator[](BlockSlot weight) const {
    return weight == kConv1Weight ? conv1 : weight == kConv2Weight ? conv2 : residual;
  }
};
/// Elements of the packed form of a weight, for a block of `type`.
inline int64_t packed_size(const Tensor& weight, at::ScalarType type) {
  return weight.defined() ? weight_parts(weight, type) * packed_size(weight).expect_int() : 0;
}
/// Behind the first `elements` of a packed tensor.
inline void* behind(const Tensor& packed, int64_t elements) {
  return static_cast<char*>(packed.mutable_data_ptr()) + elements * packed.element_size();
}
inline WeightPlaces places(const ResidualBlock& block, const Tensor& packed1, const Tensor& packed2) {
  return {packed1.mutable_data_ptr(), packed2.mutable_data_ptr(),
          behind(packed1, packed_size(block[kConv1Weight], packed1.scalar_type()))};
}
/// All in one, in the order of the block's arguments.
inline WeightPlaces places(const ResidualBlock& block, const Tensor& packed) {
  const auto size = [&](BlockSlot weight) { return packed_size(block[weight], packed.scalar_type()); };
  return {packed.mutable_data_ptr(), behind(packed, size(kConv1Weight)),
          behind(packed, size(kConv1Weight) + size(kConv2Weight))};
}
/// For data gradients of float32: as `places`, each weight as dgrad reads it.
inline int64_t transposed_size(const Tensor& weight) {
  if (!weight.defined()) return 0;
  return weight_parts(weight, at::kFloat) * weight.size(2) * weight.size(1) * gemm::padded(weight.size(0));
}
inline WeightPlaces transposed_places(const ResidualBlock& block, const Tensor& packed1, const Tensor& packed2) {
  return {packed1.mutable_data_ptr(), packed2.mutable_data_ptr(),
          behind(packed1, transposed_size(block[kConv1Weight]))};
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
