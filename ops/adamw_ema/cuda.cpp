#include "ops/common/cuda.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/cuda/adamw_ema/adamw_ema.h"
#include "ops/adamw_ema/adamw_ema.h"

namespace dpa {
namespace {

void adamw_ema_cuda(const AdamWEmaArguments& in) {
  const c10::cuda::CUDAGuard guard(in.params[0].device());
  const InOneOrder order(in);
  std::vector<kernels::AdamWTensor> tensors;
  for (const auto& m : order.members())
    tensors.push_back({m.param.mutable_data_ptr(), m.grad.mutable_data_ptr(), m.exp_avg.mutable_data_ptr(),
                       m.exp_avg_sq.mutable_data_ptr(), mutable_data_or_null(m.average),
                       in.state_steps[tensors.size()].mutable_data_ptr<float>(), m.param.numel()});
  const auto count = static_cast<int64_t>(tensors.size());
  const Tensor scratch =
      at::empty({static_cast<int64_t>(kernels::adamw_ema_scratch(count))}, in.params[0].options().dtype(at::kByte));
  const auto float_at = [](const Tensor& tensor) { return static_cast<const float*>(data_or_null(tensor)); };
  kernels::AdamWEma args = {};
  args.dtype = kernel_dtype(in.params[0].scalar_type()), args.grad_dtype = kernel_dtype(in.grads[0].scalar_type());
  args.tensors = tensors.data(), args.tensor_count = count;
  args.lr = in.lr, args.beta1 = in.beta1, args.beta2 = in.beta2;
  args.weight_decay = in.weight_decay, args.eps = in.eps;
  args.lr_at = float_at(in.tensor_lr), args.grad_scale = float_at(in.grad_scale);
  args.found_inf = float_at(in.found_inf), args.clip = data_or_null(in.clip_coef);
  if (!in.averages.empty()) args.updates = in.updates.const_data_ptr<int64_t>();
  args.schedule = in.schedule();
  args.maximize = in.maximize, args.decoupled = in.decoupled_weight_decay, args.clear = in.clear_grads;
  args.scratch = scratch.mutable_data_ptr();
  C10_CUDA_CHECK(kernels::adamw_ema(args, c10::cuda::getCurrentCUDAStream()));
  order.finish();
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) { m.impl("adamw_ema_", &adamw_ema_kernel<&adamw_ema_cuda>); }

}  // namespace dpa
