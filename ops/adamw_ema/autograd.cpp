// An optimizer's step has no derivative: parameters and gradients come without history, or without the wish for any.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include "ops/common/check.h"

namespace dpa {
namespace {

bool wants_gradient(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() && value.toTensor().requires_grad();
  if (!value.isTensorList()) return false;
  for (const Tensor& tensor : value.toTensorVector())
    if (tensor.requires_grad()) return true;
  return false;
}

void adamw_ema_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (at::GradMode::is_enabled())
    for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size()))
      DPA_CHECK(!wants_gradient(argument), "adamw_ema_",
                "tensors must not require gradients outside of torch.no_grad()", "one that does");
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Autograd, m) {
  m.impl("adamw_ema_", torch::CppFunction::makeFromBoxedFunction<&adamw_ema_autograd>());
}

}  // namespace dpa
