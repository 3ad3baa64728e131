// `dpa::group_norm_mish` and its backward in ATen ops: what forward-mode AD and second derivatives differentiate.
#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/rsqrt.h>

#include "ops/common/mish.h"
#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

/// The op's quantities in the dtype of the arithmetic; `x` and `normalized` are (B, C, L).
struct NormTerms {
  c10::SymInt batch, channels, groups;
  at::ScalarType type;
  Tensor rstd, normalized, weight, scale, u, value;

  NormTerms(const Tensor& input, int64_t num_groups, const OptionalTensor& weight_, const OptionalTensor& bias,
            double eps, const OptionalTensor& scale_)
      : batch(input.sym_size(0)), channels(input.sym_size(1)), groups(num_groups), type(input.scalar_type()) {
    if (channels == 0) groups = 0;  // whatever number divides them
    const auto x = by_group(widen(input));
    const auto centered = x - x.mean(-1, /*keepdim=*/true);
    rstd = at::rsqrt((centered * centered).mean(-1, /*keepdim=*/true) + eps);
    normalized = by_channel(centered * rstd);
    if (weight_.has_value()) weight = widen(*weight_).unsqueeze(-1);
    if (scale_.has_value()) scale = widen(*scale_).unsqueeze(-1);
    u = weight.defined() ? normalized * weight : normalized;
    if (bias.has_value()) u = u + widen(*bias).unsqueeze(-1);
    value = at::mish(u);
  }
  Tensor widen(const Tensor& tensor) const { return tensor.to(accumulate_type(type)); }
  /// (B, G, n) and (B, C, L); the last size is counted out, because it cannot be inferred for empty tensors.
  Tensor by_group(const Tensor& tensor) const {
    const auto pairs = batch * groups;
    return tensor.reshape_symint({batch, groups, pairs == 0 ? c10::SymInt(0) : tensor.sym_numel() / pairs});
  }
  Tensor by_channel(const Tensor& tensor) const {
    const auto pairs = batch * channels;
    return tensor.reshape_symint({batch, channels, pairs == 0 ? c10::SymInt(0) : tensor.sym_numel() / pairs});
  }
};

/// The values of `tensor` in the shape and order of `input`.
Tensor like(const Tensor& tensor, const Tensor& input) {
  const auto shaped = tensor.reshape_symint(input.sym_sizes());
  return is_channels_last(input) ? shaped.transpose(1, 2).contiguous().transpose(1, 2) : shaped;
}

}  // namespace

Tensor group_norm_mish_formula(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                               const OptionalTensor& shift, const OptionalTensor& residual) {
  check_group_norm_mish("group_norm_mish", input, num_groups, weight, bias, eps, scale, shift, residual);
  const NormTerms t(input, num_groups, weight, bias, eps, scale);
  auto out = t.scale.defined() ? t.value * t.scale : t.value;
  if (shift.has_value()) out = out + t.widen(*shift).unsqueeze(-1);
  if (residual.has_value()) out = out + t.by_channel(t.widen(*residual));
  return like(out, input).to(t.type);
}

NormGradients group_norm_mish_backward_formula(const Tensor& grad, const Tensor& input, int64_t num_groups,
                                               const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                               const OptionalTensor& scale, const OptionalTensor& shift,
                                               NormMask mask) {
  check_group_norm_mish("group_norm_mish", input, num_groups, weight, bias, eps, scale, shift);
  check_same("group_norm_mish_backward", "grad", grad, "input", input);
  const NormTerms t(input, num_groups, weight, bias, eps, scale);
  const auto g = t.by_channel(t.widen(grad));
  const auto grad_u = (t.scale.defined() ? g * t.scale : g) * mish_derivative(t.u);
  NormGradients result;
  if (mask[0]) {
    const auto h = t.by_group(t.weight.defined() ? grad_u * t.weight : grad_u), x = t.by_group(t.normalized);
    const auto grad_input = t.rstd * (h - h.mean(-1, true) - x * (h * x).mean(-1, true));
    std::get<0>(result) = like(grad_input, input).to(t.type);
  }
  const auto type_of = [&](const OptionalTensor& tensor) {
    return tensor.has_value() ? tensor->scalar_type() : t.type;
  };
  if (mask[1]) std::get<1>(result) = (grad_u * t.normalized).sum(at::IntArrayRef({0, 2})).to(type_of(weight));
  if (mask[2]) std::get<2>(result) = grad_u.sum(at::IntArrayRef({0, 2})).to(type_of(bias));
  if (mask[3]) std::get<3>(result) = (g * t.value).sum(-1).to(t.type);
  if (mask[4]) std::get<4>(result) = g.sum(-1).to(t.type);
  return result;
}

}  // namespace dpa
