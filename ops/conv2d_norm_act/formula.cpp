// `dpa::conv2d_norm_act` in ATen ops: what autograd differentiates, and what runs wherever no kernel of the library does.
#include <ATen/TensorOperators.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/relu.h>

#include "ops/conv2d_norm_act/conv2d_norm_act.h"

namespace dpa {

Tensor conv2d_norm_act_formula(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& residual,
                               int64_t num_groups, double eps, int64_t stride, int64_t padding, bool relu) {
  check_conv2d_norm_act(input, weight, bias, scale, shift, residual, num_groups, eps, stride, padding);
  const auto type = input.scalar_type(), wide = accumulate_type(type);
  const auto arithmetic = conv2d_arithmetic(input);
  const auto as = [](const OptionalTensor& tensor, at::ScalarType to) {
    return tensor.has_value() ? OptionalTensor(tensor->to(to)) : std::nullopt;
  };
  auto y = at::convolution(input.to(arithmetic), weight.to(arithmetic), as(bias, arithmetic), {stride, stride},
                           {padding, padding}, {1, 1}, /*transposed=*/false, {0, 0}, 1)
               .to(wide);
  const auto along = [&](const Tensor& channels) { return channels.to(wide).unsqueeze(-1).unsqueeze(-1); };
  // Of ops that take what they saved in any order: the backward of ATen's group_norm does not.
  if (num_groups > 0 && y.sym_numel() != 0) {
    // Dimensions stay as they are: a compiler takes seconds to join those whose sizes are formulas of others.
    auto groups = y.unflatten_symint(1, {num_groups, -1});
    groups = groups - groups.mean({2, 3, 4}, /*keepdim=*/true);
    const auto variance = (groups * groups).mean({2, 3, 4}, /*keepdim=*/true);
    y = (groups * (variance + eps).rsqrt()).flatten(1, 2);
  }
  if (scale.has_value()) y = y * along(*scale);
  if (shift.has_value()) y = y + along(*shift);
  if (residual.has_value()) y = y + residual->to(wide);
  return (relu ? at::relu(y) : y).to(type);
}

}  // namespace dpa
