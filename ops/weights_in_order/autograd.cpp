// It knows no derivative: whoever differentiates calls it for the gradients, too.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

TORCH_LIBRARY_IMPL(dpa, Autograd, m) { m.impl("weights_in_order", torch::autograd::autogradNotImplementedFallback()); }
