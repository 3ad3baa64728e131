// Under autocast tensors of different floating dtypes meet: the wider one wins, as in PyTorch's own products.
#include "ops/common/autocast.h"

#include <torch/library.h>

#include "ops/elementwise_mult/elementwise_mult.h"

namespace dpa {
namespace {

template <at::DeviceType Device>
Tensor elementwise_mult_autocast(const Tensor& a, const Tensor& b) {
  const Autocast cast(Device, at::promoteTypes(a.scalar_type(), b.scalar_type()));
  return elementwise_mult(cast(a), cast(b));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, AutocastCPU, m) { m.impl("elementwise_mult", &elementwise_mult_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(dpa, AutocastCUDA, m) { m.impl("elementwise_mult", &elementwise_mult_autocast<at::kCUDA>); }

}  // namespace dpa
