// Where a gradient or a tangent is asked for, the op is the convolution followed by group_norm_mish, each of which
// brings its own derivatives; the convolution's output has to be kept for them in any case.
#include <torch/library.h>

#include "ops/common/node.h"
#include "ops/conv1d/conv1d.h"
#include "ops/conv1d_gnm/conv1d_gnm.h"
#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {

Tensor conv1d_gnm(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                  const OptionalTensor& gn_weight, const OptionalTensor& gn_bias, int64_t num_groups, double eps,
                  const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual) {
  static const auto op = find_op<decltype(conv1d_gnm)>("dpa::conv1d_gnm");
  return op.call(input, conv_weight, conv_bias, gn_weight, gn_bias, num_groups, eps, scale, shift, residual);
}

namespace {

Tensor conv1d_gnm_autograd(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                           const OptionalTensor& gn_weight, const OptionalTensor& gn_bias, int64_t num_groups,
                           double eps, const OptionalTensor& scale, const OptionalTensor& shift,
                           const OptionalTensor& residual) {
  const auto derived = [](const auto&... tensors) {
    return torch::autograd::compute_requires_grad(tensors...) || any_tangent(tensors...);
  };
  if (derived(input, conv_weight, value_or_undefined(conv_bias), value_or_undefined(gn_weight),
              value_or_undefined(gn_bias), value_or_undefined(scale), value_or_undefined(shift),
              value_or_undefined(residual))) {
    check_conv1d_gnm(input, conv_weight, conv_bias, gn_weight, gn_bias, num_groups, eps, scale, shift, residual);
    return group_norm_mish(conv1d(input, conv_weight, conv_bias, 1, conv_padding(conv_weight), /*transposed=*/false),
                           num_groups, gn_weight, gn_bias, eps, scale, shift, residual);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return conv1d_gnm(input, conv_weight, conv_bias, gn_weight, gn_bias, num_groups, eps, scale, shift, residual);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) { m.impl("conv1d_gnm", &conv1d_gnm_autograd); }

}  // namespace dpa
