// For inference: asking these ops for a gradient raises.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("unet1d_batch", torch::autograd::autogradNotImplementedFallback());
  m.impl("unet1d_batch_pack", torch::autograd::autogradNotImplementedFallback());
  m.impl("unet1d_batch_pack.out", torch::autograd::autogradNotImplementedFallback());
}
