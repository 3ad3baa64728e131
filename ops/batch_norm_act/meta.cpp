#include "ops/common/meta.h"

#include <torch/library.h>

#include "ops/batch_norm_act/batch_norm_act.h"

namespace dpa {
namespace {

Tensor batch_norm_act_meta(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                           const OptionalTensor& residual, bool /*relu*/) {
  check_batch_norm_act(input, weight, bias, eps, residual);
  return meta_in_order(input);
}

BatchNormOutputs batch_norm_act_forward_meta(const Tensor& input, const OptionalTensor& weight,
                                             const OptionalTensor& bias, double eps, const OptionalTensor& residual,
                                             bool /*relu*/) {
  check_batch_norm_act(input, weight, bias, eps, residual);
  const auto options = input.options().dtype(accumulate_type(input.scalar_type()));
  const auto statistic = [&] { return at::empty_symint({input.sym_size(1)}, options); };
  return {meta_in_order(input), statistic(), statistic()};
}

BatchNormGradients batch_norm_act_backward_meta(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                                const Tensor& var, const OptionalTensor& weight,
                                                const OptionalTensor& bias, double eps, const OptionalTensor& residual,
                                                bool /*relu*/, BatchNormMask mask) {
  check_batch_norm_act(input, weight, bias, eps, residual);
  check_batch_norm_act_backward(grad, input, mean, var);
  const auto per_channel = [&](int i, const OptionalTensor& parameter) {
    const auto options = parameter.has_value() ? parameter->options() : input.options();
    return mask[i] ? at::empty_symint({input.sym_size(1)}, options) : Tensor();
  };
  return {meta_in_order(input, mask[0]), per_channel(1, weight), per_channel(2, bias), meta_in_order(input, mask[3])};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("batch_norm_act", &batch_norm_act_meta);
  m.impl("batch_norm_act_forward", &batch_norm_act_forward_meta);
  m.impl("batch_norm_act_backward", &batch_norm_act_backward_meta);
}

}  // namespace dpa
