// On the CPU the GEMMs are libtorch's, those of bfloat16 our own. One pass over the gates makes the state or its
// gradients.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>

#include "kernels/math/lltm.h"
#include "ops/common/convert.h"
#include "ops/common/vectorize.h"
#include "ops/lltm/lltm.h"

namespace dpa {
namespace {

/// Neighbouring cells of one sample. Gate g of cell s is linear[g * states + s] + bias[g * states + s].
template <class T>
struct Cells {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const A* linear;
  const T *bias, *old_cell;
  int64_t states, count;

  DPA_ALWAYS_INLINE math::LltmCell<A> operator[](int64_t s) const {
    return {linear[s] + widen(bias[s]), linear[s + states] + widen(bias[s + states]),
            linear[s + 2 * states] + widen(bias[s + 2 * states]), widen(old_cell[s])};
  }
};

template <class T>
DPA_VECTORIZE void new_states(const Cells<T> cells, T* h, T* new_cell) {
#pragma GCC ivdep
  for (int64_t s = 0; s < cells.count; ++s) {
    const auto cell = cells[s];
    narrow(cell.h(), h[s]);
    narrow(cell.cell, new_cell[s]);
  }
}

/// The gates' gradients lie as the gates do.
template <class T, class A>
DPA_VECTORIZE void cell_gradients(const Cells<T> cells, const T* grad_h, const T* grad_cell, A* to_gates, T* to_cell) {
  A *to_output = to_gates + cells.states, *to_candidate = to_output + cells.states;
#pragma GCC ivdep
  for (int64_t s = 0; s < cells.count; ++s) {
    const auto grad = cells[s].gradient(widen(grad_h[s]), widen(grad_cell[s]));
    to_gates[s] = grad.input, to_output[s] = grad.output, to_candidate[s] = grad.candidate;
    narrow(grad.old_cell, to_cell[s]);
  }
}

/// Calls f(i, gate, cells) for pieces of rows, in parallel: `i` is the first cell, `gate` its first gate.
template <class T, class F>
void for_each_piece_of_row(const Tensor& bias_, const Tensor& old_cell_, const Tensor& gates_, const F& f) {
  const auto bias = bias_.contiguous(), old_cell = old_cell_.contiguous(), gates = gates_.contiguous();
  const int64_t states = old_cell.size(1);
  const auto *b = bias.const_data_ptr<T>(), *old = old_cell.const_data_ptr<T>();
  const auto* linear = gates.const_data_ptr<typename Cells<T>::A>();
  at::parallel_for(0, old_cell.numel(), 8192, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const int64_t s = i % states, gate = i / states * 3 * states + s, count = std::min(states - s, end - i);
      f(i, gate, Cells<T>{linear + gate, b + s, old + i, states, count});
      i += count;
    }
  });
}

LltmStateAndGates lltm_forward_cpu(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                                   const Tensor& old_cell) {
  check_lltm(input, weights, bias, old_h, old_cell);
  const auto gates = lltm_gemm(at::cat({old_h, input}, 1), weights);
  auto new_h = at::empty(old_h.sizes(), old_h.options()), new_cell = at::empty(old_h.sizes(), old_h.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, old_cell.scalar_type(), "lltm", [&] {
    auto *h = new_h.mutable_data_ptr<scalar_t>(), *c = new_cell.mutable_data_ptr<scalar_t>();
    for_each_piece_of_row<scalar_t>(bias, old_cell, gates, [&](int64_t i, int64_t, const Cells<scalar_t>& cells) {
      new_states(cells, h + i, c + i);
    });
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
  auto grad_old_cell = at::empty(old_cell.sizes(), old_cell.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, old_cell.scalar_type(), "lltm_backward", [&] {
    const auto *gh = grad_h.const_data_ptr<scalar_t>(), *gc = grad_cell.const_data_ptr<scalar_t>();
    auto* to = grad_gates.mutable_data_ptr<typename Cells<scalar_t>::A>();
    auto* to_cell = grad_old_cell.mutable_data_ptr<scalar_t>();
    for_each_piece_of_row<scalar_t>(bias, old_cell, gates, [&](int64_t i, int64_t gate, const Cells<scalar_t>& cells) {
      cell_gradients(cells, gh + i, gc + i, to + gate, to_cell + i);
    });
  });
  const auto x = mask[1] ? at::cat({old_h, input}, 1) : Tensor();
  auto grads = lltm_gemm_gradients(grad_gates, x, weights, states, mask);
  if (grads.x.defined()) {
    grads.input = grads.x.slice(1, states).contiguous();
    grads.old_h = grads.x.slice(1, 0, states).contiguous();
  }
  const auto grad_bias = mask[2] ? grad_gates.sum(0).to(input.scalar_type()).view(bias.sizes()) : Tensor();
  return {grads.input, grads.weights, grad_bias, grads.old_h, mask[4] ? grad_old_cell : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("lltm", &lltm_cpu);
  m.impl("lltm_forward", &lltm_forward_cpu);
  m.impl("lltm_backward", &lltm_backward_cpu);
}

}  // namespace dpa
