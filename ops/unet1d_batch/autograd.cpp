// For inference: asking these ops for a gradient raises.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  for (const char* op :
       {"unet1d_batch", "unet1d_batch_film", "unet1d_batch_on_film", "unet1d_batch_pack", "unet1d_batch_pack.out"})
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
}
