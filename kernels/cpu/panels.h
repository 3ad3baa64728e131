// Panels of packed weights: 16 outputs each, with the inputs in order.
#pragma once

namespace dpa::kernels::cpu {

constexpr int kPanel = 16;
inline int padded(int channels) { return (channels + kPanel - 1) / kPanel * kPanel; }

/// How weights are stored, and what they are multiplied with.
enum class Weights {
  kFloat32,      // a word a weight
  kFloat16,      // a word holds two weights, of neighbouring inputs, the first in the low half; inputs are float32
  kBFloat16,     // the same
  kBFloat16Dot,  // the same, with inputs in bfloat16
};

}  // namespace dpa::kernels::cpu
