// The matrix products of the cell at sizes where a library's are the faster ones.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>

#include "ops/lltm/lltm.h"

namespace dpa {
namespace {

/// a @ b in the dtype of accumulation; a GPU keeps the 16-bit operands and rounds nothing on the way out.
Tensor widening_mm(const Tensor& a, const Tensor& b) {
  const auto type = accumulate_type(a.scalar_type());
  if (a.scalar_type() == type) return at::mm(a, b);
  if (a.is_cuda()) return at::mm(a, b, type);
  return at::mm(a.to(type), b.to(type));
}

}  // namespace

Tensor lltm_products(const Tensor& input, const Tensor& weights, const Tensor& old_h) {
  return widening_mm(at::cat({old_h, input}, 1), weights.t());
}

LltmGradients lltm_product_gradients(const Tensor& grad_gates, const Tensor& input, const Tensor& weights,
                                     const Tensor& bias, const Tensor& old_h, LltmMask mask) {
  const auto grad = grad_gates.to(input.scalar_type());
  const int64_t state = old_h.size(1);
  LltmGradients result;
  if (mask[0] && mask[3]) {  // one product fills the chip better than two
    const auto both = at::mm(grad, weights);
    std::get<0>(result) = both.slice(1, state).contiguous();
    std::get<3>(result) = both.slice(1, 0, state).contiguous();
  } else if (mask[0]) {
    std::get<0>(result) = at::mm(grad, weights.slice(1, state));
  } else if (mask[3]) {
    std::get<3>(result) = at::mm(grad, weights.slice(1, 0, state));
  }
  if (mask[1]) std::get<1>(result) = at::mm(grad.t(), at::cat({old_h, input}, 1));
  if (mask[2]) std::get<2>(result) = grad_gates.sum(0).to(input.scalar_type()).view(bias.sizes());
  return result;
}

}  // namespace dpa
