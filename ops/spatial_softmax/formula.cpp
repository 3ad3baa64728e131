// `dpa::spatial_softmax` in ATen ops: what autograd differentiates, and what runs on a GPU. Feature maps are small.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>

#include "ops/spatial_softmax/spatial_softmax.h"

namespace dpa {

void check_spatial_softmax(const Tensor& input, const OptionalTensor& temperature) {
  constexpr const char* op = "spatial_softmax";
  check_floating(op, "input", input);
  DPA_CHECK(input.dim() == 4, op, "input must have 4 dimensions (B, K, H, W)", "shape ", input.sym_sizes());
  DPA_CHECK(input.sym_size(2) >= 1 && input.sym_size(3) >= 1, op, "input must have at least one pixel", "shape ",
            input.sym_sizes());
  if (!temperature.has_value()) return;
  check_parameter_type(op, "temperature", *temperature, input);
  DPA_CHECK(temperature->sym_numel() == 1, op, "temperature must have one element", "shape ", temperature->sym_sizes());
}

Tensor spatial_softmax_formula(const Tensor& input, const OptionalTensor& temperature) {
  check_spatial_softmax(input, temperature);
  const auto sizes = input.sym_sizes();
  auto logits = input.to(accumulate_type(input.scalar_type()));
  if (temperature.has_value()) logits = logits / temperature->to(logits.scalar_type()).reshape({});
  const auto weights =
      logits.reshape_symint({sizes[0], sizes[1], sizes[2] * sizes[3]}).softmax(-1).reshape_symint(sizes);
  // From -1 to 1; one pixel is at -1, as in torch.linspace, which takes no symbolic sizes here.
  const auto along = [&](int dim) {
    const auto from_zero = at::arange(at::Scalar(sizes[dim]), logits.options());
    return (sizes[dim] > 1 ? from_zero.mul(2).div(at::Scalar(sizes[dim] - 1)) : from_zero) - 1;
  };
  const auto x = (weights.sum(2) * along(3)).sum(-1), y = (weights.sum(3) * along(2)).sum(-1);
  return at::stack({x, y}, -1).to(input.scalar_type());
}

}  // namespace dpa
