// Inference alone: asking these ops for a gradient raises, and what is written in place counts as changed.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("parallel_window", torch::autograd::autogradNotImplementedFallback());
  m.impl("parallel_move_", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(dpa, ADInplaceOrView, m) {
  m.impl("parallel_move_", torch::autograd::autogradNotImplementedInplaceOrViewFallback());
}
