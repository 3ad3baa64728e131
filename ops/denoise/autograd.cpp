#include <torch/library.h>

#include "ops/common/node.h"
#include "ops/denoise/denoise.h"

namespace dpa {

Tensor denoise(const Tensor& model_output, const Tensor& sample, const Tensor& diffusion_constants,
               const Tensor& timestep, const Tensor& diffusion_noise) {
  static const auto op = find_op<decltype(denoise)>("dpa::denoise");
  return op.call(model_output, sample, diffusion_constants, timestep, diffusion_noise);
}

StepGradients denoise_backward(const Tensor& grad, const Tensor& model_output, const Tensor& sample,
                               const Tensor& diffusion_constants, const Tensor& timestep, const Tensor& diffusion_noise,
                               StepMask output_mask) {
  static const auto op = find_op<decltype(denoise_backward)>("dpa::denoise_backward");
  return op.call(grad, model_output, sample, diffusion_constants, timestep, diffusion_noise, output_mask);
}

namespace {

struct DenoiseBackward : SavingNode<DenoiseBackward, 5> {
  std::string name() const override { return "DenoiseBackward"; }

  static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted) {
    const auto& [model_output, sample, diffusion_constants, timestep, diffusion_noise] = saved;
    if (!gradients[0].defined()) return variable_list(4);
    const StepMask mask{wanted[0], wanted[1], wanted[2], wanted[3]};
    auto [g0, g1, g2, g3] =
        denoise_backward(gradients[0], model_output, sample, diffusion_constants, timestep, diffusion_noise, mask);
    return {g0, g1, g2, g3};
  }
};

Tensor denoise_autograd(const Tensor& model_output, const Tensor& sample, const Tensor& diffusion_constants,
                        const Tensor& timestep, const Tensor& diffusion_noise) {
  if (any_tangent(model_output, sample, diffusion_constants, diffusion_noise))
    return denoise_formula(model_output, sample, diffusion_constants, timestep, diffusion_noise);
  NodePtr<DenoiseBackward> node;
  if (torch::autograd::compute_requires_grad(model_output, sample, diffusion_constants, diffusion_noise)) {
    node = make_node<DenoiseBackward>(model_output, sample, diffusion_constants, diffusion_noise);
    node->save(model_output, sample, diffusion_constants, timestep, diffusion_noise);
  }
  Tensor out;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    out = denoise(model_output, sample, diffusion_constants, timestep, diffusion_noise);
  }
  if (node) torch::autograd::set_history(out, node);
  return out;
}

StepGradients denoise_backward_autograd(const Tensor& grad, const Tensor& model_output, const Tensor& sample,
                                        const Tensor& diffusion_constants, const Tensor& timestep,
                                        const Tensor& diffusion_noise, StepMask output_mask) {
  if (torch::autograd::compute_requires_grad(grad, model_output, sample, diffusion_constants, diffusion_noise) ||
      any_tangent(grad, model_output, sample, diffusion_constants, diffusion_noise))
    return denoise_backward_formula(grad, model_output, sample, diffusion_constants, timestep, diffusion_noise,
                                    output_mask);
  at::AutoDispatchBelowADInplaceOrView guard;
  return denoise_backward(grad, model_output, sample, diffusion_constants, timestep, diffusion_noise, output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("denoise", &denoise_autograd);
  m.impl("denoise_backward", &denoise_backward_autograd);
}

}  // namespace dpa
