// Packed weights are for inference: asking these ops for a gradient raises.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  for (const char* op :
       {"unet1d_pack", "unet1d", "unet1d_film", "unet1d_step_film", "unet1d_on_film", "diffusion_sample_clocks",
        "diffusion_sample", "diffusion_sample_on_film", "unet1d_by_name", "diffusion_sample_by_name"})
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
}
