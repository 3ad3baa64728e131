#include "ops/common/meta.h"

#include <torch/library.h>

#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

/// Of the shape, dtype and order of `input`.
Tensor like(const Tensor& input) {
  if (!is_channels_last(input)) return meta_like(input);
  return empty_in_order(input.sym_size(0), input.sym_size(1), input.sym_size(2), true, input.options());
}

Tensor group_norm_mish_meta(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                            const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                            const OptionalTensor& shift, const OptionalTensor& residual) {
  check_group_norm_mish("group_norm_mish", input, num_groups, weight, bias, eps, scale, shift, residual);
  return like(input);
}

NormGradients group_norm_mish_backward_meta(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                            const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                            const OptionalTensor& scale, const OptionalTensor& shift, NormMask mask) {
  check_group_norm_mish("group_norm_mish", input, num_groups, weight, bias, eps, scale, shift);
  check_same("group_norm_mish_backward", "grad", grad, "input", input);
  const auto batch = input.sym_size(0), channels = input.sym_size(1);
  const auto per_channel = [&](int i, const OptionalTensor& parameter) {
    const auto options = parameter.has_value() ? parameter->options() : input.options();
    return mask[i] ? at::empty_symint({channels}, options) : Tensor();
  };
  const auto per_sample = [&](int i) {
    return mask[i] ? at::empty_symint({batch, channels}, input.options()) : Tensor();
  };
  return {mask[0] ? like(input) : Tensor(), per_channel(1, weight), per_channel(2, bias), per_sample(3), per_sample(4)};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("group_norm_mish", &group_norm_mish_meta);
  m.impl("group_norm_mish_backward", &group_norm_mish_backward_meta);
}

}  // namespace dpa
