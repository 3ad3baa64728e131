#include "ops/common/cuda.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "test/ops/own_op/kernel.h"
#include "test/ops/own_op/swiglu.h"

namespace own {
namespace {

Tensor forward_op(const Tensor& gate, const Tensor& value) {
  check(gate, value);
  const c10::cuda::CUDAGuard guard(gate.device());
  const auto x = gate.contiguous(), y = value.contiguous();
  auto out = at::empty(x.sizes(), x.options());
  C10_CUDA_CHECK(swiglu_cuda(dpa::kernel_dtype(x.scalar_type()), x.const_data_ptr(), y.const_data_ptr(),
                             out.mutable_data_ptr(), x.numel(), c10::cuda::getCurrentCUDAStream()));
  return out;
}

std::tuple<Tensor, Tensor> backward_op(const Tensor& grad, const Tensor& gate, const Tensor& value) {
  check(gate, value);
  check(gate, grad);
  const c10::cuda::CUDAGuard guard(gate.device());
  const auto z = grad.contiguous(), x = gate.contiguous(), y = value.contiguous();
  auto grad_gate = at::empty(x.sizes(), x.options()), grad_value = at::empty(x.sizes(), x.options());
  C10_CUDA_CHECK(swiglu_backward_cuda(dpa::kernel_dtype(x.scalar_type()), z.const_data_ptr(), x.const_data_ptr(),
                                      y.const_data_ptr(), grad_gate.mutable_data_ptr(), grad_value.mutable_data_ptr(),
                                      x.numel(), c10::cuda::getCurrentCUDAStream()));
  return {grad_gate, grad_value};
}

}  // namespace

TORCH_LIBRARY_IMPL(own, CUDA, m) {
  m.impl("swiglu", &forward_op);
  m.impl("swiglu_backward", &backward_op);
}

}  // namespace own
