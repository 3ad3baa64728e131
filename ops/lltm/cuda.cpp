// On CUDA small cells are one kernel forward and two backward; at large sizes the products are libtorch's.
#include "ops/common/cuda.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/lltm.h"
#include "ops/lltm/lltm.h"

namespace dpa {
namespace {

/// Keeps the contiguous copies alive beside the launcher's arguments.
struct LltmLaunch {
  Tensor input, weights, bias, old_h, old_cell;
  kernels::Lltm args;

  LltmLaunch(const Tensor& input_, const Tensor& weights_, const Tensor& bias_, const Tensor& old_h_,
             const Tensor& old_cell_)
      : input(input_.contiguous()),
        weights(weights_.contiguous()),
        bias(bias_.contiguous()),
        old_h(old_h_.contiguous()),
        old_cell(old_cell_.contiguous()) {
    args = {kernel_dtype(input.scalar_type()),
            input.const_data_ptr(),
            weights.const_data_ptr(),
            bias.const_data_ptr(),
            old_h.const_data_ptr(),
            old_cell.const_data_ptr(),
            /*new_h=*/nullptr,
            /*new_cell=*/nullptr,
            /*gates=*/nullptr,
            input.size(0),
            input.size(1),
            old_h.size(1)};
  }
  bool small() const { return kernels::lltm_is_small(args.batch, args.features, args.state); }
};

LltmStateAndGates run_lltm(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                           const Tensor& old_cell, bool keep_gates) {
  check_lltm(input, weights, bias, old_h, old_cell);
  const c10::cuda::CUDAGuard guard(input.device());
  LltmLaunch in(input, weights, bias, old_h, old_cell);
  auto new_h = at::empty(old_h.sizes(), old_h.options()), new_cell = at::empty(old_h.sizes(), old_h.options());
  in.args.new_h = new_h.mutable_data_ptr();
  in.args.new_cell = new_cell.mutable_data_ptr();
  Tensor gates;
  if (!in.small()) {
    gates = lltm_products(in.input, in.weights, in.old_h);
  } else if (keep_gates) {
    const auto type = accumulate_type(input.scalar_type());
    gates = at::empty({input.size(0), 3 * old_h.size(1)}, input.options().dtype(type));
  }
  in.args.gates = mutable_data_or_null(gates);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(in.small() ? kernels::lltm_small(in.args, stream) : kernels::lltm_state(in.args, stream));
  return {new_h, new_cell, gates};
}

LltmStateAndGates lltm_forward_cuda(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                                    const Tensor& old_cell) {
  return run_lltm(input, weights, bias, old_h, old_cell, /*keep_gates=*/true);
}

LltmState lltm_cuda(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                    const Tensor& old_cell) {
  auto [new_h, new_cell, gates] = run_lltm(input, weights, bias, old_h, old_cell, /*keep_gates=*/false);
  return {new_h, new_cell};
}

LltmGradients lltm_backward_cuda(const Tensor& grad_h_, const Tensor& grad_cell_, const Tensor& input,
                                 const Tensor& weights, const Tensor& bias, const Tensor& old_h, const Tensor& old_cell,
                                 const Tensor& gates_, LltmMask mask) {
  check_lltm(input, weights, bias, old_h, old_cell);
  check_lltm_backward(grad_h_, grad_cell_, old_h, gates_);
  const c10::cuda::CUDAGuard guard(input.device());
  LltmLaunch in(input, weights, bias, old_h, old_cell);
  const auto grad_h = grad_h_.contiguous(), grad_cell = grad_cell_.contiguous(), gates = gates_.contiguous();
  in.args.gates = const_cast<void*>(gates.const_data_ptr());  // read alone, in the backward
  auto grad_gates = at::empty(gates.sizes(), gates.options());
  const auto like = [](bool wanted, const Tensor& t) { return wanted ? at::empty(t.sizes(), t.options()) : Tensor(); };
  auto grad_old_cell = like(mask[4], old_cell);
  kernels::LltmBackward args{in.args,
                             grad_h.const_data_ptr(),
                             grad_cell.const_data_ptr(),
                             grad_gates.mutable_data_ptr(),
                             mutable_data_or_null(grad_old_cell),
                             nullptr,
                             nullptr,
                             nullptr,
                             nullptr};
  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(kernels::lltm_gate_gradients(args, stream));
  if (!in.small()) {
    auto result = lltm_product_gradients(grad_gates, in.input, in.weights, bias, in.old_h, mask);
    std::get<4>(result) = grad_old_cell;
    return result;
  }
  auto grad_input = like(mask[0], input), grad_weights = like(mask[1], weights), grad_bias = like(mask[2], bias);
  auto grad_old_h = like(mask[3], old_h);
  args.grad_input = mutable_data_or_null(grad_input);
  args.grad_weights = mutable_data_or_null(grad_weights);
  args.grad_bias = mutable_data_or_null(grad_bias);
  args.grad_old_h = mutable_data_or_null(grad_old_h);
  C10_CUDA_CHECK(kernels::lltm_product_gradients(args, stream));
  return {grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("lltm", &lltm_cuda);
  m.impl("lltm_forward", &lltm_forward_cuda);
  m.impl("lltm_backward", &lltm_backward_cuda);
}

}  // namespace dpa
