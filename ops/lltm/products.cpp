// The matrix products of the cell at sizes where a library's are the faster ones.
#include <ATen/TensorOperators.h>
#include <ATen/ops/mm.h>

#include "ops/lltm/lltm.h"

namespace dpa {

Tensor lltm_products(const Tensor& x, const Tensor& weights) {
  const auto type = accumulate_type(x.scalar_type());
  if (x.scalar_type() == type) return at::mm(x, weights.t());
  // A GPU keeps the 16-bit operands and rounds nothing on the way out.
  if (x.is_cuda()) return at::mm(x, weights.t(), type);
  return at::mm(x.to(type), weights.t().to(type));
}

LltmProductGradients lltm_product_gradients(const Tensor& grad_gates, const Tensor& x, const Tensor& weights,
                                            int64_t state, LltmMask mask) {
  const auto grad = grad_gates.to(weights.scalar_type());
  LltmProductGradients result;
  if (mask[0] && mask[3])
    result.x = at::mm(grad, weights);  // one product fills the chip better than two
  else if (mask[0])
    result.input = at::mm(grad, weights.slice(1, state));
  else if (mask[3])
    result.old_h = at::mm(grad, weights.slice(1, 0, state));
  if (mask[1]) result.weights = at::mm(grad.t(), x);
  return result;
}

}  // namespace dpa
