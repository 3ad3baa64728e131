#include "ops/common/meta.h"

#include <torch/library.h>

#include "ops/group_norm_act/group_norm_act.h"
#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

Tensor group_norm_act_meta(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, const OptionalTensor& residual, bool /*relu*/) {
  check_group_norm_mish(group_norm_act.name(), input, num_groups, weight, bias, eps, {}, {}, residual);
  return meta_in_order(input);
}

NormActGradients group_norm_act_backward_meta(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                              const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                              const OptionalTensor& residual, bool /*relu*/, NormActMask mask) {
  check_group_norm_mish(group_norm_act.name(), input, num_groups, weight, bias, eps, {}, {}, residual);
  check_same(group_norm_act_backward.name(), "grad", grad, "input", input);
  const auto per_channel = [&](int i, const OptionalTensor& parameter) {
    const auto options = parameter.has_value() ? parameter->options() : input.options();
    return mask[i] ? at::empty_symint({input.sym_size(1)}, options) : Tensor();
  };
  return {meta_in_order(input, mask[0]), per_channel(1, weight), per_channel(2, bias), meta_in_order(input, mask[3])};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("group_norm_act", &group_norm_act_meta);
  m.impl("group_norm_act_backward", &group_norm_act_backward_meta);
}

}  // namespace dpa
