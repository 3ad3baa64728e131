#include "ops/common/meta.h"

#include <torch/library.h>

#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

Tensor group_norm_mish_meta(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                            const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                            const OptionalTensor& shift) {
  check_group_norm_mish("group_norm_mish", input, num_groups, weight, bias, eps, scale, shift);
  return meta_like(input);
}

NormGradients group_norm_mish_backward_meta(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                            const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                            const OptionalTensor& scale, const OptionalTensor& shift, NormMask mask) {
  check_group_norm_mish("group_norm_mish", input, num_groups, weight, bias, eps, scale, shift);
  check_same("group_norm_mish_backward", "grad", grad, "input", input);
  const auto batch = input.sym_size(0), channels = input.sym_size(1);
  const auto per_channel = [&](int i) { return mask[i] ? at::empty_symint({channels}, input.options()) : Tensor(); };
  const auto per_sample = [&](int i) {
    return mask[i] ? at::empty_symint({batch, channels}, input.options()) : Tensor();
  };
  return {meta_like(input, mask[0]), per_channel(1), per_channel(2), per_sample(3), per_sample(4)};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("group_norm_mish", &group_norm_mish_meta);
  m.impl("group_norm_mish_backward", &group_norm_mish_backward_meta);
}

}  // namespace dpa
