// `dpa::batch_norm_act` and its backward in ATen ops: what forward-mode AD and second derivatives differentiate, and what
// runs wherever no kernel of the library does.
#include <ATen/TensorOperators.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/threshold_backward.h>

#include "ops/batch_norm_act/batch_norm_act.h"
#include "ops/common/strides.h"

namespace dpa {
namespace {

/// The op's quantities in the dtype of the arithmetic: (B, C, L), statistics (1, C, 1), `u` what ReLU is taken of.
struct BatchNormTerms {
  c10::SymInt batch, channels;
  at::ScalarType type;
  Tensor mean, var, rstd, normalized, weight, u;

  BatchNormTerms(const Tensor& input, const OptionalTensor& weight_, const OptionalTensor& bias, double eps,
                 const OptionalTensor& residual)
      : batch(input.sym_size(0)), channels(input.sym_size(1)), type(input.scalar_type()) {
    const auto x = in_rows(input);
    mean = average(x);
    const auto centered = x - mean;
    var = average(centered * centered);
    rstd = at::rsqrt(var + eps);
    u = normalized = centered * rstd;
    if (weight_.has_value()) u = u * (weight = widen(*weight_).unsqueeze(-1));
    if (bias.has_value()) u = u + widen(*bias).unsqueeze(-1);
    if (residual.has_value()) u = u + in_rows(*residual);
  }
  Tensor widen(const Tensor& tensor) const { return tensor.to(accumulate_type(type)); }
  /// (B, C, L); the last size is counted out, because it cannot be inferred for empty tensors.
  Tensor in_rows(const Tensor& tensor) const {
    const auto pairs = batch * channels;
    return widen(tensor).reshape_symint({batch, channels, pairs == 0 ? c10::SymInt(0) : tensor.sym_numel() / pairs});
  }
  static Tensor average(const Tensor& rows) { return rows.mean(at::IntArrayRef({0, 2}), /*keepdim=*/true); }
};

}  // namespace

BatchNormOutputs batch_norm_act_forward_formula(const Tensor& input, const OptionalTensor& weight,
                                                const OptionalTensor& bias, double eps, const OptionalTensor& residual,
                                                bool relu) {
  check_batch_norm_act(input, weight, bias, eps, residual);
  const BatchNormTerms t(input, weight, bias, eps, residual);
  const auto flat = [&](const Tensor& statistic) { return statistic.reshape_symint({t.channels}); };
  return {values_like(relu ? at::relu(t.u) : t.u, input), flat(t.mean), flat(t.var)};
}

BatchNormGradients batch_norm_act_backward_formula(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                                   const Tensor& var, const OptionalTensor& weight,
                                                   const OptionalTensor& bias, double eps,
                                                   const OptionalTensor& residual, bool relu, BatchNormMask mask) {
  check_batch_norm_act(input, weight, bias, eps, residual);
  check_batch_norm_act_backward(grad, input, mean, var);
  const BatchNormTerms t(input, weight, bias, eps, residual);
  auto g = t.in_rows(grad);
  if (relu) g = at::threshold_backward(g, t.u, 0);
  BatchNormGradients result;
  if (mask[0]) {
    const auto h = t.weight.defined() ? g * t.weight : g;
    std::get<0>(result) = values_like(t.rstd * (h - t.average(h) - t.normalized * t.average(h * t.normalized)), input);
  }
  const auto type_of = [&](const OptionalTensor& tensor) {
    return tensor.has_value() ? tensor->scalar_type() : t.type;
  };
  if (mask[1]) std::get<1>(result) = (g * t.normalized).sum(at::IntArrayRef({0, 2})).to(type_of(weight));
  if (mask[2]) std::get<2>(result) = g.sum(at::IntArrayRef({0, 2})).to(type_of(bias));
  if (mask[3]) std::get<3>(result) = values_like(g, input);
  return result;
}

BatchNormOutputs batch_norm_act_by_aten(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                        double eps, const OptionalTensor& residual, bool relu) {
  auto result = batch_norm_act_forward_formula(input, weight, bias, eps, residual, relu);
  std::get<0>(result) = image_in_order(std::get<0>(result), is_channels_last_image(input));
  return result;
}

BatchNormGradients batch_norm_act_backward_by_aten(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                                   const Tensor& var, const OptionalTensor& weight,
                                                   const OptionalTensor& bias, double eps,
                                                   const OptionalTensor& residual, bool relu, BatchNormMask mask) {
  auto result = batch_norm_act_backward_formula(grad, input, mean, var, weight, bias, eps, residual, relu, mask);
  for (auto* const image : {&std::get<0>(result), &std::get<3>(result)})
    if (image->defined()) *image = image_in_order(*image, is_channels_last_image(input));
  return result;
}

}  // namespace dpa
