// Panels of packed weights: 16 outputs each, with the inputs in order.
#pragma once
#include "kernels/common/dtype.h"

namespace dpa::kernels::cpu {

constexpr int kPanel = 16;
inline int padded(int channels) { return (channels + kPanel - 1) / kPanel * kPanel; }

/// How weights are stored, and what they are multiplied with.
enum class Weights {
  kFloat32,      // a word a weight
  kFloat16,      // a word holds two weights, of neighbouring inputs, the first in the low half; inputs are float32
  kBFloat16,     // the same
  kBFloat16Dot,  // the same, with inputs in bfloat16
  kBFloat16AsFloat16,  // the same, multiplied in float16, with inputs in float16
  kBFloat16Tiles,      // the same, with inputs as sums of two bfloat16
};

/// The type of the inputs that weights are multiplied with.
constexpr DType input_dtype(Weights kind) {
  if (kind == Weights::kBFloat16Dot || kind == Weights::kBFloat16Tiles) return DType::kBFloat16;
  return kind == Weights::kBFloat16AsFloat16 ? DType::kFloat16 : DType::kFloat32;
}
constexpr int input_bytes(Weights kind) { return input_dtype(kind) == DType::kFloat32 ? 4 : 2; }

}  // namespace dpa::kernels::cpu
