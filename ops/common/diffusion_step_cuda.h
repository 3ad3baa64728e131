// The CUDA side that `denoise` and `scheduler_step` share: from prepared inputs to a launch.
#pragma once
#include <ATen/ops/empty_like.h>

#include "kernels/cuda/common/diffusion_step.h"
#include "ops/common/cuda.h"
#include "ops/common/diffusion_step.h"

namespace dpa {

inline kernels::DiffusionStep step_arguments(const StepInputs& in, double clip, const Tensor& out) {
  return {kernel_dtype(in.sample.scalar_type()),
          in.model_output.const_data_ptr(),
          in.sample.const_data_ptr(),
          data_or_null(in.noise),
          in.table.const_data_ptr(),
          in.index.const_data_ptr<int64_t>(),
          mutable_data_or_null(out),
          in.batch,
          in.inner,
          in.rows,
          clip};
}

using StepLauncher = cudaError_t (*)(const kernels::DiffusionStep&, cudaStream_t);
using StepBackwardLauncher = cudaError_t (*)(const kernels::DiffusionStepBackward&, cudaStream_t);

inline Tensor step_cuda(StepLauncher launcher, const StepInputs& in, double clip) {
  const c10::cuda::CUDAGuard guard(in.sample.device());
  auto out = at::empty_like(in.sample);
  C10_CUDA_CHECK(launcher(step_arguments(in, clip, out), c10::cuda::getCurrentCUDAStream()));
  return out;
}

inline StepGradients step_backward_cuda(StepBackwardLauncher launcher, const StepInputs& in, double clip,
                                        const Tensor& grad_, const Tensor& table, const StepMask& mask) {
  const c10::cuda::CUDAGuard guard(in.sample.device());
  const auto grad = grad_.contiguous();
  const auto like = [&](bool wanted, const Tensor& tensor) { return wanted ? at::empty_like(tensor) : Tensor(); };
  auto grad_output = like(mask[0], in.sample), grad_sample = like(mask[1], in.sample);
  auto grad_table = like(mask[2], in.table), grad_noise = like(mask[3], in.sample);
  const kernels::DiffusionStepBackward args{step_arguments(in, clip, Tensor()), grad.const_data_ptr(),
                                            mutable_data_or_null(grad_output),  mutable_data_or_null(grad_sample),
                                            mutable_data_or_null(grad_noise),   mutable_data_or_null(grad_table)};
  C10_CUDA_CHECK(launcher(args, c10::cuda::getCurrentCUDAStream()));
  if (mask[2]) grad_table = grad_table.to(table.scalar_type()).view(table.sizes());
  return {grad_output, grad_sample, grad_table, grad_noise};
}

}  // namespace dpa
