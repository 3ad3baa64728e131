// Under autocast a step of the sampler runs in float32, whatever the network's output came in.
#include "ops/common/autocast.h"

#include <torch/library.h>

#include "ops/denoise/denoise.h"

namespace dpa {
namespace {

template <at::DeviceType Device>
Tensor denoise_autocast(const Tensor& model_output, const Tensor& sample, const Tensor& diffusion_constants,
                        const Tensor& timestep, const Tensor& diffusion_noise) {
  const Autocast cast(Device, at::kFloat);
  return denoise(cast(model_output), cast(sample), cast(diffusion_constants), timestep, cast(diffusion_noise));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, AutocastCPU, m) { m.impl("denoise", &denoise_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(dpa, AutocastCUDA, m) { m.impl("denoise", &denoise_autocast<at::kCUDA>); }

}  // namespace dpa
