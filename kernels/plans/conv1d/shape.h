// The sizes of a convolution, for host code with or without CUDA.
#pragma once
#include <cstdint>

#include "kernels/common/dtype.h"

namespace dpa::kernels::conv1d {

constexpr int kMaxTaps = 9;

// The tensors x and y in (batch, time, channels) order and the weight between them; conv1d.h has the formulas.
struct Conv1d {
  DType dtype;  // of the tensors: float16, bfloat16, or float32, multiplied in tf32 but for `halves`
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
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// The channels of an operand's row: the next multiple of 8.
constexpr int64_t padded(int64_t channels) { return (channels + 7) / 8 * 8; }
// The same for long rows: of whole lines of memory, which TMA reads faster than parts of two.
constexpr int64_t padded_to_lines(int64_t channels) { return (channels + 63) / 64 * 64; }

}  // namespace dpa::kernels::conv1d
