#include "ops/common/meta.h"

#include <torch/library.h>

#include "ops/lltm/lltm.h"

namespace dpa {
namespace {

LltmState lltm_meta(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                    const Tensor& old_cell) {
  check_lltm(input, weights, bias, old_h, old_cell);
  return {meta_like(old_h), meta_like(old_h)};
}

LltmStateAndGates lltm_forward_meta(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                                    const Tensor& old_cell) {
  check_lltm(input, weights, bias, old_h, old_cell);
  const auto options = input.options().dtype(accumulate_type(input.scalar_type()));
  return {meta_like(old_h), meta_like(old_h), at::empty_symint({input.sym_size(0), 3 * old_h.sym_size(1)}, options)};
}

LltmGradients lltm_backward_meta(const Tensor& grad_h, const Tensor& grad_cell, const Tensor& input,
                                 const Tensor& weights, const Tensor& bias, const Tensor& old_h, const Tensor& old_cell,
                                 const Tensor& gates, LltmMask mask) {
  check_lltm(input, weights, bias, old_h, old_cell);
  check_lltm_backward(grad_h, grad_cell, old_h, gates);
  return {meta_like(input, mask[0]), meta_like(weights, mask[1]), meta_like(bias, mask[2]), meta_like(old_h, mask[3]),
          meta_like(old_cell, mask[4])};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("lltm", &lltm_meta);
  m.impl("lltm_forward", &lltm_forward_meta);
  m.impl("lltm_backward", &lltm_backward_meta);
}

}  // namespace dpa
