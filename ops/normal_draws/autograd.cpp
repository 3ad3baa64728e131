// Random numbers depend on no tensor's values: there is nothing to differentiate.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("normal_draws", torch::autograd::autogradNotImplementedFallback());
  m.impl("loop_inputs_", torch::CppFunction::makeFallthrough());
}
