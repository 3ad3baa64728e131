#include <torch/library.h>

#include "ops/common/autocast.h"
#include "ops/common/node.h"
#include "ops/denoise/denoise.h"

namespace dpa {
namespace {

struct DenoiseBackward : SavingNode<DenoiseBackward, 5> {
  std::string name() const override { return "DenoiseBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted) {
    const auto& [model_output, sample, diffusion_constants, timestep, diffusion_noise] = saved;
    if (!gradients[0].defined()) return variable_list(4);
    const StepMask mask{wanted[0], wanted[1], wanted[2], wanted[3]};
    return as_list(
        denoise_backward(gradients[0], model_output, sample, diffusion_constants, timestep, diffusion_noise, mask));
  }
};

Tensor denoise_autograd(const Tensor& model_output, const Tensor& sample, const Tensor& diffusion_constants,
                        const Tensor& timestep, const Tensor& diffusion_noise) {
  if (any_tangent(model_output, sample, diffusion_constants, diffusion_noise))
    return denoise_formula(model_output, sample, diffusion_constants, timestep, diffusion_noise);
  const auto node = node_if_wanted<DenoiseBackward>(model_output, sample, diffusion_constants, diffusion_noise);
  if (node) node->save(model_output, sample, diffusion_constants, timestep, diffusion_noise);
  return with_history(below_autograd(denoise, model_output, sample, diffusion_constants, timestep, diffusion_noise),
                      node);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("denoise", &denoise_autograd);
  m.impl("denoise_backward", formula_autograd<denoise_backward, &denoise_backward_formula>);
}

// Under autocast a step of the sampler runs in float32, whatever the network's output came in.
DPA_AUTOCAST(denoise, InFloat)

}  // namespace dpa
