#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>

#include "test/ops/own_op/swiglu.h"

namespace own {
namespace {

/// Calls `body(T, A)` with the dtype and that of its arithmetic, which is float32 for 16-bit types.
template <class Body>
void for_dtype(at::ScalarType type, const Body& body) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, "own::swiglu", [&] {
    body(scalar_t{}, std::conditional_t<std::is_same_v<scalar_t, double>, double, float>{});
  });
}

Tensor swiglu_cpu(const Tensor& gate, const Tensor& value) {
  check(gate, value);
  const auto x = gate.contiguous(), y = value.contiguous();
  auto out = at::empty(x.sizes(), x.options());
  for_dtype(x.scalar_type(), [&]<class T, class A>(T, A) {
    const T *g = x.const_data_ptr<T>(), *v = y.const_data_ptr<T>();
    T* o = out.mutable_data_ptr<T>();
    for (int64_t i = 0; i < x.numel(); ++i) o[i] = T(A(g[i]) / (1 + std::exp(-A(g[i]))) * A(v[i]));
  });
  return out;
}

std::tuple<Tensor, Tensor> swiglu_backward_cpu(const Tensor& grad, const Tensor& gate, const Tensor& value) {
  check(gate, value);
  check(gate, grad);
  const auto z = grad.contiguous(), x = gate.contiguous(), y = value.contiguous();
  auto grad_gate = at::empty(x.sizes(), x.options()), grad_value = at::empty(x.sizes(), x.options());
  for_dtype(x.scalar_type(), [&]<class T, class A>(T, A) {
    const T *d = z.const_data_ptr<T>(), *g = x.const_data_ptr<T>(), *v = y.const_data_ptr<T>();
    T *dg = grad_gate.mutable_data_ptr<T>(), *dv = grad_value.mutable_data_ptr<T>();
    for (int64_t i = 0; i < x.numel(); ++i) {
      const A s = 1 / (1 + std::exp(-A(g[i])));
      dg[i] = T(A(d[i]) * A(v[i]) * s * (1 + A(g[i]) * (1 - s)));
      dv[i] = T(A(d[i]) * A(g[i]) * s);
    }
  });
  return {grad_gate, grad_value};
}

}  // namespace

TORCH_LIBRARY_IMPL(own, CPU, m) {
  m.impl("swiglu", &swiglu_cpu);
  m.impl("swiglu_backward", &swiglu_backward_cpu);
}

}  // namespace own
