// On CUDA small cells are one kernel forward and two backward; at large sizes the GEMMs are libtorch's.
#include "ops/common/cuda.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/cuda/lltm/lltm.h"
#include "kernels/plans/lltm/plan.h"
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
  /// X in memory, for a library's GEMM.
  Tensor joined() const {
    auto x = at::empty({args.batch, args.state + args.features}, input.options());
    const kernels::LltmRows rows{args.dtype,
                                 const_cast<void*>(args.old_h),
                                 const_cast<void*>(args.input),
                                 x.mutable_data_ptr(),
                                 args.batch,
                                 args.state,
                                 args.features};  // both read alone
    C10_CUDA_CHECK(kernels::lltm_join(rows, c10::cuda::getCurrentCUDAStream()));
    return x;
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
    gates = lltm_gemm(in.joined(), in.weights);
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

Tensor empty_like_if(bool wanted, const Tensor& tensor) {
  return wanted ? at::empty(tensor.sizes(), tensor.options()) : Tensor();
}

/// The GEMM's gradients at large sizes; `args.forward` are those of `in`.
LltmGradients large_gemm_gradients(const LltmLaunch& in, kernels::LltmBackward args, const Tensor& grad_gates,
                                   LltmMask mask) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto& size = in.args;
  auto grads = lltm_gemm_gradients(grad_gates, mask[1] ? in.joined() : Tensor(), in.weights, size.state, mask);
  if (grads.x.defined()) {
    grads.input = empty_like_if(true, in.input);
    grads.old_h = empty_like_if(true, in.old_h);
    const kernels::LltmRows rows{size.dtype,
                                 grads.old_h.mutable_data_ptr(),
                                 grads.input.mutable_data_ptr(),
                                 grads.x.mutable_data_ptr(),
                                 size.batch,
                                 size.state,
                                 size.features};
    C10_CUDA_CHECK(kernels::lltm_split(rows, stream));
  }
  constexpr int64_t kOneBlockSums = 4096;  // samples; of more, ATen's sum makes more blocks
  Tensor grad_bias;
  if (mask[2] && size.batch > kOneBlockSums) {
    grad_bias = grad_gates.sum(0).to(in.bias.scalar_type()).view(in.bias.sizes());
  } else if (mask[2]) {
    grad_bias = empty_like_if(true, in.bias);
    args.grad_bias = grad_bias.mutable_data_ptr();
    C10_CUDA_CHECK(kernels::lltm_bias_gradient(args, stream));
  }
  return {grads.input, grads.weights, grad_bias, grads.old_h, Tensor()};
}

LltmGradients lltm_backward_cuda(const Tensor& grad_h, const Tensor& grad_cell, const Tensor& input,
                                 const Tensor& weights, const Tensor& bias, const Tensor& old_h, const Tensor& old_cell,
                                 const Tensor& gates_, LltmMask mask) {
  check_lltm(input, weights, bias, old_h, old_cell);
  check_lltm_backward(grad_h, grad_cell, old_h, gates_);
  const c10::cuda::CUDAGuard guard(input.device());
  LltmLaunch in(input, weights, bias, old_h, old_cell);
  const auto gates = gates_.contiguous();
  in.args.gates = const_cast<void*>(gates.const_data_ptr());  // read alone, in the backward
  auto grad_gates = at::empty(gates.sizes(), gates.options());
  auto grad_old_cell = empty_like_if(mask[4], old_cell);
  kernels::LltmBackward args{};
  args.forward = in.args;
  args.grad_h = grad_h.const_data_ptr();
  args.grad_cell = grad_cell.const_data_ptr();
  for (int d = 0; d < 2; ++d) {
    args.grad_h_strides[d] = grad_h.stride(d);
    args.grad_cell_strides[d] = grad_cell.stride(d);
  }
  args.grad_gates = grad_gates.mutable_data_ptr();
  args.grad_old_cell = mutable_data_or_null(grad_old_cell);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(kernels::lltm_gate_gradients(args, stream));
  if (!in.small()) {
    auto result = large_gemm_gradients(in, args, grad_gates, mask);
    std::get<4>(result) = grad_old_cell;
    return result;
  }
  auto grad_input = empty_like_if(mask[0], input), grad_weights = empty_like_if(mask[1], weights);
  auto grad_bias = empty_like_if(mask[2], bias), grad_old_h = empty_like_if(mask[3], old_h);
  args.grad_input = mutable_data_or_null(grad_input);
  args.grad_weights = mutable_data_or_null(grad_weights);
  args.grad_bias = mutable_data_or_null(grad_bias);
  args.grad_old_h = mutable_data_or_null(grad_old_h);
  C10_CUDA_CHECK(kernels::lltm_operand_gradients(args, stream));
  return {grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("lltm", &lltm_cuda);
  m.impl("lltm_forward", &lltm_forward_cuda);
  m.impl("lltm_backward", &lltm_backward_cuda);
}

}  // namespace dpa
