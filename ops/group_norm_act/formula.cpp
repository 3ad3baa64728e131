// `dpa::group_norm_act` and its backward in ATen ops: what forward-mode AD and second derivatives differentiate, and what
// runs wherever no kernel of the library does.
#include <ATen/TensorOperators.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/threshold_backward.h>

#include "ops/common/strides.h"
#include "ops/group_norm_act/group_norm_act.h"
#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

/// The op's quantities in the dtype of the arithmetic: (B, C, L), `rstd` (B, G, 1), `u` what ReLU is taken of.
struct NormActTerms {
  c10::SymInt batch, channels, groups;
  at::ScalarType type;
  Tensor rstd, normalized, weight, u;

  NormActTerms(const Tensor& input, int64_t num_groups, const OptionalTensor& weight_, const OptionalTensor& bias,
               double eps, const OptionalTensor& residual)
      : batch(input.sym_size(0)), channels(input.sym_size(1)), groups(num_groups), type(input.scalar_type()) {
    if (channels == 0) groups = 0;  // whatever number divides them
    const auto x = in_rows(widen(input), groups);
    const auto centered = x - x.mean(-1, /*keepdim=*/true);
    rstd = at::rsqrt((centered * centered).mean(-1, /*keepdim=*/true) + eps);
    u = normalized = in_rows(centered * rstd, channels);
    if (weight_.has_value()) u = u * (weight = widen(*weight_).unsqueeze(-1));
    if (bias.has_value()) u = u + widen(*bias).unsqueeze(-1);
    if (residual.has_value()) u = u + in_rows(widen(*residual), channels);
  }
  Tensor widen(const Tensor& tensor) const { return tensor.to(accumulate_type(type)); }
  /// (B, rows, n); the last size is counted out, because it cannot be inferred for empty tensors.
  Tensor in_rows(const Tensor& tensor, const c10::SymInt& rows) const {
    const auto pairs = batch * rows;
    return tensor.reshape_symint({batch, rows, pairs == 0 ? c10::SymInt(0) : tensor.sym_numel() / pairs});
  }
};

}  // namespace

Tensor group_norm_act_formula(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                              const OptionalTensor& bias, double eps, const OptionalTensor& residual, bool relu) {
  check_group_norm_mish(group_norm_act.name(), input, num_groups, weight, bias, eps, {}, {}, residual);
  const NormActTerms t(input, num_groups, weight, bias, eps, residual);
  return values_like(relu ? at::relu(t.u) : t.u, input);
}

NormActGradients group_norm_act_backward_formula(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                                 const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                                 const OptionalTensor& residual, bool relu, NormActMask mask) {
  check_group_norm_mish(group_norm_act.name(), input, num_groups, weight, bias, eps, {}, {}, residual);
  check_same(group_norm_act_backward.name(), "grad", grad, "input", input);
  const NormActTerms t(input, num_groups, weight, bias, eps, residual);
  auto g = t.in_rows(t.widen(grad), t.channels);
  if (relu) g = at::threshold_backward(g, t.u, 0);
  NormActGradients result;
  if (mask[0]) {
    const auto h = t.in_rows(t.weight.defined() ? g * t.weight : g, t.groups);
    const auto x = t.in_rows(t.normalized, t.groups);
    std::get<0>(result) = values_like(t.rstd * (h - h.mean(-1, true) - x * (h * x).mean(-1, true)), input);
  }
  const auto type_of = [&](const OptionalTensor& tensor) {
    return tensor.has_value() ? tensor->scalar_type() : t.type;
  };
  if (mask[1]) std::get<1>(result) = (g * t.normalized).sum(at::IntArrayRef({0, 2})).to(type_of(weight));
  if (mask[2]) std::get<2>(result) = g.sum(at::IntArrayRef({0, 2})).to(type_of(bias));
  if (mask[3]) std::get<3>(result) = values_like(g, input);
  return result;
}

Tensor group_norm_act_by_aten(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                              const OptionalTensor& bias, double eps, const OptionalTensor& residual, bool relu) {
  const auto out = group_norm_act_formula(input, num_groups, weight, bias, eps, residual, relu);
  return image_in_order(out, is_channels_last_image(input));
}

NormActGradients group_norm_act_backward_by_aten(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                                 const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                                 const OptionalTensor& residual, bool relu, NormActMask mask) {
  auto result = group_norm_act_backward_formula(grad, input, num_groups, weight, bias, eps, residual, relu, mask);
  for (auto* const image : {&std::get<0>(result), &std::get<3>(result)})
    if (image->defined()) *image = image_in_order(*image, is_channels_last_image(input));
  return result;
}

}  // namespace dpa
