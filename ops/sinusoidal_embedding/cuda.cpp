#include "ops/common/cuda.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/cuda/sinusoidal_embedding/sinusoidal_embedding.h"
#include "ops/sinusoidal_embedding/sinusoidal_embedding.h"

namespace dpa {
namespace {

Tensor sinusoidal_embedding_cuda(const Tensor& timesteps, int64_t dim, const OptionalDtype& dtype) {
  check_sinusoidal_embedding(timesteps, dim, dtype);
  const c10::cuda::CUDAGuard guard(timesteps.device());
  const auto wide = angle_dtype(timesteps), type = timesteps.scalar_type(), out_type = result_dtype(timesteps, dtype);
  if (out_type != at::kDouble && out_type != at::kFloat && out_type != at::kHalf && out_type != at::kBFloat16)
    return sinusoidal_embedding_formula(timesteps, dim, dtype);
  const auto given = (type == at::kLong ? timesteps : timesteps.to(wide)).contiguous();
  auto sizes = timesteps.sizes().vec();
  sizes.push_back(dim);
  auto out = at::empty(sizes, timesteps.options().dtype(out_type));
  if (out.numel() == 0) return out;
  using Timesteps = kernels::SinusoidalEmbedding::Timesteps;
  C10_CUDA_CHECK(kernels::sinusoidal_embedding(
      {given.const_data_ptr(),
       type == at::kLong     ? Timesteps::kInt64
       : wide == at::kDouble ? Timesteps::kFloat64
                             : Timesteps::kFloat32,
       given.numel(), dim, log_frequency_step(dim), out.mutable_data_ptr(), kernel_dtype(out_type)},
      c10::cuda::getCurrentCUDAStream()));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) { m.impl("sinusoidal_embedding", &sinusoidal_embedding_cuda); }

}  // namespace dpa
