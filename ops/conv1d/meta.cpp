#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
#include <torch/version.h>

#include "kernels/plans/conv1d/plan.h"
#include "ops/common/strides.h"
#include "ops/conv1d/conv1d.h"

namespace dpa {

namespace {

bool is_served(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding) {
  if (!kernels::conv1d::built_with_kernels()) return false;
  if (input.device().type() != at::kCUDA || stride > 2 || !is_channels_last(input)) return false;
  for (int64_t taps = 1; taps <= kernels::conv1d::kMaxTaps; ++taps)
    if (weight.sym_size(2) == taps) return taps >= stride && padding < taps;
  return false;
}

}  // namespace

bool conv1d_packs(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding) {
  const auto type = input.scalar_type();
  return (type == at::kHalf || type == at::kBFloat16) && is_served(input, weight, stride, padding);
}

bool convolves_in_tf32() {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 10
  const auto* const convolutions = "conv";
#else
  const auto convolutions = at::Float32Op::CONV;
#endif
  const auto& context = at::globalContext();
  return context.userEnabledCuDNN() && context.allowTF32CuDNN(convolutions);
}

bool conv1d_in_tf32(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding) {
  return input.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat &&
         is_served(input, weight, stride, padding) && convolves_in_tf32();
}

namespace {

Tensor conv1d_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride,
                   int64_t padding, bool transposed) {
  check_conv1d("conv1d", input, weight, bias, stride, padding, transposed);
  return empty_in_order(input.sym_size(0), weight.sym_size(transposed ? 1 : 0),
                        conv1d_length(input.sym_size(2), weight.sym_size(2), stride, padding, transposed),
                        is_channels_last(input), input.options());
}

Conv1dForward conv1d_forward_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride,
                                  int64_t padding, bool transposed) {
  auto out = conv1d_meta(input, weight, bias, stride, padding, transposed);
  if (!conv1d_packs(input, weight, stride, padding)) return {out, at::empty({0}, input.options())};
  const c10::SymInt width = (weight.sym_size(1) + 7) / 8 * 8;
  return {out, at::empty_symint({weight.sym_size(2), weight.sym_size(0), width}, input.options())};
}

Conv1dGradients conv1d_backward_meta(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                     const OptionalTensor& bias, const Tensor& packed, int64_t stride, int64_t padding,
                                     bool transposed, Conv1dMask mask) {
  check_conv1d("conv1d", input, weight, bias, stride, padding, transposed);
  check_conv1d_grad(grad, input, weight, stride, padding, transposed);
  check_conv1d_packed(packed, input, weight);
  Conv1dGradients result;
  if (mask[0])
    std::get<0>(result) = empty_in_order(input.sym_size(0), input.sym_size(1), input.sym_size(2),
                                         is_channels_last(input), input.options());
  if (mask[1]) std::get<1>(result) = at::empty_symint(weight.sym_sizes(), weight.options());
  if (mask[2])
    std::get<2>(result) =
        at::empty_symint({weight.sym_size(transposed ? 1 : 0)}, bias.has_value() ? bias->options() : weight.options());
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("conv1d", &conv1d_meta);
  m.impl("conv1d_forward", &conv1d_forward_meta);
  m.impl("conv1d_backward", &conv1d_backward_meta);
}

}  // namespace dpa
