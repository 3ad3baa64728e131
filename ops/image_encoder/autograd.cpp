// For inference: asking these ops for a gradient raises.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  for (const char* op : {"image_encoder", "image_encoder_pack"})
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
}
