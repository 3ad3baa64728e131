#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "test/ops/own_op/swiglu.h"

namespace own {
namespace {

Tensor like(const Tensor& x) { return at::empty_symint(x.sym_sizes(), x.options()); }

Tensor swiglu_meta(const Tensor& gate, const Tensor& value) {
  check(gate, value);
  return like(gate);
}

std::tuple<Tensor, Tensor> swiglu_backward_meta(const Tensor& grad, const Tensor& gate, const Tensor& value) {
  check(gate, value);
  check(gate, grad);
  return {like(gate), like(value)};
}

}  // namespace

TORCH_LIBRARY_IMPL(own, Meta, m) {
  m.impl("swiglu", &swiglu_meta);
  m.impl("swiglu_backward", &swiglu_backward_meta);
}

}  // namespace own
