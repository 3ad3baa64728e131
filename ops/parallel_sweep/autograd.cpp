// Inference alone: asking these ops for a gradient raises, and what is written in place counts as changed.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  for (const char* op : {"parallel_window", "parallel_move_"})
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(dpa, ADInplaceOrView, m) {
  m.impl("parallel_move_", torch::autograd::autogradNotImplementedInplaceOrViewFallback());
}
