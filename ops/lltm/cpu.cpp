// On the CPU the products are libtorch's, and one pass over the gates makes the state or its gradients.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "kernels/math/lltm.h"
#include "ops/lltm/lltm.h"

namespace dpa {
namespace {

/// Calls f(i, gate, cell) for every (sample, state) i, whose first gate is at `gate`, with `make(T{})`'s functor.
template <class F>
void for_each_cell(const Tensor& bias_, const Tensor& old_cell_, const Tensor& gates_, const F& make) {
  const auto bias = bias_.contiguous(), old_cell = old_cell_.contiguous(), gates = gates_.contiguous();
  const int64_t states = old_cell.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, old_cell.scalar_type(), "lltm", [&] {
    using A = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const auto *b = bias.const_data_ptr<scalar_t>(), *old = old_cell.const_data_ptr<scalar_t>();
    const A* products = gates.const_data_ptr<A>();
    const auto f = make(scalar_t{});
    at::parallel_for(0, old_cell.numel(), 2048, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t s = i % states, gate = i / states * 3 * states + s;
        f(i, gate,
          math::LltmCell<A>(products[gate] + A(b[s]), products[gate + states] + A(b[s + states]),
                            products[gate + 2 * states] + A(b[s + 2 * states]), A(old[i])));
      }
    });
  });
}

LltmStateAndGates lltm_forward_cpu(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                                   const Tensor& old_cell) {
  check_lltm(input, weights, bias, old_h, old_cell);
  const auto gates = lltm_products(at::cat({old_h, input}, 1), weights);
  auto new_h = at::empty(old_h.sizes(), old_h.options()), new_cell = at::empty(old_h.sizes(), old_h.options());
  for_each_cell(bias, old_cell, gates, [&]<class T>(T) {
    auto *h = new_h.mutable_data_ptr<T>(), *c = new_cell.mutable_data_ptr<T>();
    return [=](int64_t i, int64_t, const auto& cell) {
      h[i] = static_cast<T>(cell.h());
      c[i] = static_cast<T>(cell.cell);
    };
  });
  return {new_h, new_cell, gates};
}

LltmState lltm_cpu(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                   const Tensor& old_cell) {
  auto [new_h, new_cell, gates] = lltm_forward_cpu(input, weights, bias, old_h, old_cell);
  return {new_h, new_cell};
}

LltmGradients lltm_backward_cpu(const Tensor& grad_h_, const Tensor& grad_cell_, const Tensor& input,
                                const Tensor& weights, const Tensor& bias, const Tensor& old_h, const Tensor& old_cell,
                                const Tensor& gates, LltmMask mask) {
  check_lltm(input, weights, bias, old_h, old_cell);
  check_lltm_backward(grad_h_, grad_cell_, old_h, gates);
  const auto grad_h = grad_h_.contiguous(), grad_cell = grad_cell_.contiguous();
  const int64_t states = old_h.size(1);
  auto grad_gates = at::empty(gates.sizes(), gates.options());
  auto grad_old_cell = mask[4] ? at::empty(old_cell.sizes(), old_cell.options()) : Tensor();
  for_each_cell(bias, old_cell, gates, [&]<class T>(T) {
    using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const auto *gh = grad_h.const_data_ptr<T>(), *gc = grad_cell.const_data_ptr<T>();
    A* to = grad_gates.mutable_data_ptr<A>();
    T* to_cell = mask[4] ? grad_old_cell.mutable_data_ptr<T>() : nullptr;
    return [=](int64_t i, int64_t gate, const auto& cell) {
      const auto grad = cell.gradient(gh[i], gc[i]);
      to[gate] = grad.input, to[gate + states] = grad.output, to[gate + 2 * states] = grad.candidate;
      if (to_cell) to_cell[i] = static_cast<T>(grad.old_cell);
    };
  });
  const auto x = mask[1] ? at::cat({old_h, input}, 1) : Tensor();
  auto grads = lltm_product_gradients(grad_gates, x, weights, states, mask);
  if (grads.x.defined()) {
    grads.input = grads.x.slice(1, states).contiguous();
    grads.old_h = grads.x.slice(1, 0, states).contiguous();
  }
  const auto grad_bias = mask[2] ? grad_gates.sum(0).to(input.scalar_type()).view(bias.sizes()) : Tensor();
  return {grads.input, grads.weights, grad_bias, grads.old_h, grad_old_cell};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("lltm", &lltm_cpu);
  m.impl("lltm_forward", &lltm_forward_cpu);
  m.impl("lltm_backward", &lltm_backward_cpu);
}

}  // namespace dpa
