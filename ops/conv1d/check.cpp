#include "ops/conv1d/conv1d.h"

namespace dpa {
namespace {

/// Whether 64 bits hold every number on the way to the output's length. Symbolic sizes are those of real tensors.
bool is_countable_length(const c10::SymInt& length, const c10::SymInt& taps, int64_t stride, int64_t padding,
                         bool transposed) {
  const auto n = length.maybe_as_int(), k = taps.maybe_as_int();
  int64_t reach = 0, pads = 0, sum = 0;
  if (__builtin_mul_overflow(padding, int64_t{2}, &pads)) return false;
  if (!n.has_value() || !k.has_value()) return true;
  if (!transposed) return !__builtin_add_overflow(*n, pads, &sum);
  return !__builtin_mul_overflow(*n, stride, &reach) && !__builtin_add_overflow(reach, *k, &sum);
}

}  // namespace

c10::SymInt conv1d_length(const c10::SymInt& length, const c10::SymInt& taps, int64_t stride, int64_t padding,
                          bool transposed) {
  if (transposed) return (length - 1) * stride - 2 * padding + taps;
  return (length + 2 * padding - taps) / stride + 1;
}

void check_conv1d(const char* op, const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride,
                  int64_t padding, bool transposed) {
  check_floating(op, "input", input);
  DPA_CHECK(input.dim() == 3, op, "input must have 3 dimensions (B, C_in, T)", "shape ", input.sym_sizes());
  check_parameter_type(op, "weight", weight, input);
  const int in = transposed ? 0 : 1;
  DPA_CHECK(weight.dim() == 3 && weight.sym_size(in) == input.sym_size(1), op,
            c10::str("weight must have shape ", transposed ? "(C_in, C_out, k)" : "(C_out, C_in, k)",
                     " with C_in = ", input.sym_size(1)),
            weight.sym_sizes());
  check_convolution(op, "weight", weight);
  DPA_CHECK(weight.sym_size(2) >= 1, op, "weight must have at least one tap", weight.sym_size(2));
  check_parameter(op, "bias", bias, weight.sym_size(1 - in), "(C_out)", input);
  DPA_CHECK(stride >= 1, op, "stride must be at least 1", stride);
  DPA_CHECK(padding >= 0, op, "padding must be at least 0", padding);
  DPA_CHECK(is_countable_length(input.sym_size(2), weight.sym_size(2), stride, padding, transposed), op,
            "stride and padding must give a length that 64 bits hold", stride, " and ", padding);
  const auto length = conv1d_length(input.sym_size(2), weight.sym_size(2), stride, padding, transposed);
  const bool fits =
      transposed ? input.sym_size(2) >= 1 && length >= 1 : input.sym_size(2) + 2 * padding >= weight.sym_size(2);
  DPA_CHECK(fits, op, "input must be long enough for one output", "length ", input.sym_size(2));
  const auto padded = transposed ? length : input.sym_size(2) + 2 * padding;
  DPA_CHECK(is_countable({input.sym_size(0), input.sym_size(1), padded}) &&
                is_countable({input.sym_size(0), weight.sym_size(1 - in), padded}),
            op, "stride and padding must give tensors whose bytes 64 bits count", stride, " and ", padding);
}

void check_conv1d_grad(const Tensor& grad, const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding,
                       bool transposed) {
  const auto length = conv1d_length(input.sym_size(2), weight.sym_size(2), stride, padding, transposed);
  check_shape("conv1d_backward", "grad", grad, {input.sym_size(0), weight.sym_size(transposed ? 1 : 0), length},
              "(B, C_out, T_out)", "input", input);
}

void check_conv1d_packed(const Tensor& packed, const Tensor& input, const Tensor& weight) {
  constexpr const char* op = "conv1d_backward";
  if (packed.dim() == 1 && packed.sym_size(0) == 0) return;
  const auto width = (weight.sym_size(1) + 7) / 8 * 8;
  check_shape(op, "packed", packed, {weight.sym_size(2), weight.sym_size(0), width}, "(0) or (k, d0, d1 padded)",
              "input", input);
}

}  // namespace dpa
