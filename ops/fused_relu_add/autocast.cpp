// Under autocast tensors of different floating dtypes meet: the wider one wins, as in PyTorch's own sums.
#include "ops/common/autocast.h"

#include <torch/library.h>

#include "ops/fused_relu_add/fused_relu_add.h"

namespace dpa {
namespace {

template <at::DeviceType Device>
Tensor fused_relu_add_autocast(const Tensor& x, const Tensor& y, double bias) {
  const Autocast cast(Device, at::promoteTypes(x.scalar_type(), y.scalar_type()));
  return fused_relu_add(cast(x), cast(y), bias);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, AutocastCPU, m) { m.impl("fused_relu_add", &fused_relu_add_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(dpa, AutocastCUDA, m) { m.impl("fused_relu_add", &fused_relu_add_autocast<at::kCUDA>); }

}  // namespace dpa
