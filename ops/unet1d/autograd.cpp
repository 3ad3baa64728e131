// Packed weights are for inference: asking these ops for a gradient raises.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("unet1d_pack", torch::autograd::autogradNotImplementedFallback());
  m.impl("unet1d", torch::autograd::autogradNotImplementedFallback());
  m.impl("unet1d_film", torch::autograd::autogradNotImplementedFallback());
  m.impl("unet1d_step_film", torch::autograd::autogradNotImplementedFallback());
  m.impl("unet1d_on_film", torch::autograd::autogradNotImplementedFallback());
  m.impl("diffusion_sample_clocks", torch::autograd::autogradNotImplementedFallback());
  m.impl("diffusion_sample", torch::autograd::autogradNotImplementedFallback());
  m.impl("diffusion_sample_on_film", torch::autograd::autogradNotImplementedFallback());
  m.impl("unet1d_by_name", torch::autograd::autogradNotImplementedFallback());
  m.impl("diffusion_sample_by_name", torch::autograd::autogradNotImplementedFallback());
}
