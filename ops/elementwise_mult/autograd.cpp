#include <ATen/ops/mul.h>
#include <ATen/ops/resolve_neg.h>
#include <torch/library.h>

#include "ops/common/autocast.h"
#include "ops/common/node.h"
#include "ops/elementwise_mult/elementwise_mult.h"

namespace dpa {
namespace {

/// The derivatives are multiplications: the op is its own backward, of any order.
struct ElementwiseMultBackward : SavingNode<ElementwiseMultBackward, 2> {
  std::string name() const override { return "ElementwiseMultBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted) {
    const auto& [a, b] = saved;
    const auto& grad = gradients[0];
    if (!grad.defined()) return variable_list(2);
    return {wanted[0] ? elementwise_mult(grad, b) : Tensor(), wanted[1] ? elementwise_mult(grad, a) : Tensor()};
  }
};

Tensor elementwise_mult_autograd(const Tensor& a, const Tensor& b) {
  if (any_tangent(a, b)) {
    check_pair("elementwise_mult", "a", a, "b", b);
    return at::mul(a, b);
  }
  const auto node = node_if_wanted<ElementwiseMultBackward>(a, b);
  if (node) node->save(a, b);
  return with_history(below_autograd(elementwise_mult, a, b), node);
}

void elementwise_mult_out_autograd(const Tensor& a, const Tensor& b, const Tensor& out) {
  TORCH_CHECK(!any_gradient(a, b, out) && !any_tangent(a, b, out),
              "dpa::elementwise_mult: out must not be given where a gradient is wanted, got a tensor that requires "
              "grad: omit out, or call under torch.no_grad()");
  at::AutoDispatchBelowAutograd guard;
  elementwise_mult_out(a, b, out);
}

/// A node that saved `out` for its backward sees by the version that it has changed.
void elementwise_mult_out_inplace(const Tensor& a, const Tensor& b, const Tensor& out) {
  below_autograd(elementwise_mult_out, a, b, out);
  torch::autograd::impl::bump_version(out);
}

/// Views that negate or conjugate when they are read, such as z.conj().imag. PyTorch's own fallback for them takes for
/// granted that an out variant returns its output, and reads beyond the stack where it returns nothing.
void elementwise_mult_out_lazy(const Tensor& a, const Tensor& b, const Tensor& out) {
  check_elementwise_mult_out(a, b, out);
  TORCH_CHECK(!out.is_neg(),
              "dpa::elementwise_mult: out must hold its values as they are, got a view that negates them when they are "
              "read: give out.resolve_neg(), or omit out");
  elementwise_mult_out(a.resolve_neg(), b.resolve_neg(), out);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Negative, m) { m.impl("elementwise_mult.out", &elementwise_mult_out_lazy); }
TORCH_LIBRARY_IMPL(dpa, Conjugate, m) { m.impl("elementwise_mult.out", &elementwise_mult_out_lazy); }

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("elementwise_mult", &elementwise_mult_autograd);
  m.impl("elementwise_mult.out", &elementwise_mult_out_autograd);
}

TORCH_LIBRARY_IMPL(dpa, ADInplaceOrView, m) { m.impl("elementwise_mult.out", &elementwise_mult_out_inplace); }

// Under autocast tensors of different floating dtypes meet: the wider one wins, as in PyTorch's own multiplication.
DPA_AUTOCAST(elementwise_mult, InWidestType)

}  // namespace dpa
