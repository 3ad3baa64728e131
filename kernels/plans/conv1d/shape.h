// The sizes of a convolution, for host code with or without CUDA.
#pragma once
#include <cstdint>

#include "kernels/common/dtype.h"

namespace dpa::kernels::conv1d {

constexpr int kMaxTaps = 9;

// The tensors x and y in (batch, time, channels) order and the weight between them; conv1d.h has the formulas.
struct Conv1d {
  DType dtype;  // of the tensors: float16, bfloat16, or float32, multiplied in tf32 but for `halves` and `in_full`
  int64_t batch;
  int64_t y_length, y_channels;
  int64_t x_length, x_channels;
  int taps, stride, padding;
  // Nothing runs beside it: a call may take as many multiprocessors as make it fast. In training the weight gradient
  // would wait for them.
  bool alone = false;
  int64_t first_channels = 0;  // of the first of two tensors that x is side by side, multiples of 8; 0: x is one
  // Float32 to its own accuracy: operands are pairs of float16 numbers (conv1d.h), fprop and dgrad alone.
  bool halves = false;
  // fprop and dgrad read weights of float32 as they lie in the parameter (plan.h: can_read_in_place).
  bool in_place = false;
};

// In how many tf32 numbers a float32 weight comes: itself, or, of few elements, two, whose sum is the weight to 21 bits.
// A weight's rounding is the same in all samples, so it does not average out as that of activations does
// (docs/training-log.md), and PyTorch multiplies many small convolutions in float32.
constexpr int64_t kMostInTwoParts = 1 << 18;
constexpr int weight_parts(DType dtype, int64_t elements) {
  return dtype == DType::kFloat32 && elements <= kMostInTwoParts ? 2 : 1;
}
constexpr int weight_parts(const Conv1d& conv) {
  return conv.halves ? 1 : weight_parts(conv.dtype, conv.y_channels * conv.x_channels * conv.taps);
}

// Whether a convolution of float32 is multiplied to float32's accuracy, both operands in two parts, by warp-level MMAs on
// every GPU: of small ones PyTorch multiplies most in float32 where it may take tf32.
constexpr int64_t kMostWeightsInFull = 1 << 14, kMostInFull = 1 << 25;  // elements, multiplications
static_assert(kMostWeightsInFull <= kMostInTwoParts, "the weights come in two parts");
constexpr bool in_full(const Conv1d& conv) {
  const int64_t weights = conv.y_channels * conv.x_channels * conv.taps, rows = conv.batch * conv.y_length;
  return conv.dtype == DType::kFloat32 && !conv.halves && weights <= kMostWeightsInFull &&
         rows * weights <= kMostInFull;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// The channels of an operand's row: the next multiple of 8.
constexpr int64_t padded(int64_t channels) { return (channels + 7) / 8 * 8; }
// The same for long rows: of whole lines of memory, which TMA reads faster than parts of two.
constexpr int64_t padded_to_lines(int64_t channels) { return (channels + 63) / 64 * 64; }

}  // namespace dpa::kernels::conv1d
