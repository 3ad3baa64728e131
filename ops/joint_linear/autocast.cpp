// Under autocast the input comes in the region's 16-bit dtype. Parameters that are all float32 stay as they are, as
// those of `dpa::conv1d`; others come in the input's dtype, since the op takes one dtype for all of them.
#include "ops/common/autocast.h"

#include <torch/library.h>

#include <algorithm>

#include "ops/joint_linear/joint_linear.h"

namespace dpa {
namespace {

template <at::DeviceType Device>
Tensor joint_linear_autocast(const Tensor& input, at::TensorList weights, at::TensorList biases,
                             const OptionalTensor& rest) {
  const Autocast cast(Device);
  const auto narrow = cast(input);
  const auto wide = [](const Tensor& tensor) { return tensor.scalar_type() == at::kFloat; };
  const bool stay =
      std::all_of(weights.begin(), weights.end(), wide) && std::all_of(biases.begin(), biases.end(), wide);
  const auto parameters = [&](at::TensorList tensors) {
    std::vector<Tensor> result;
    for (const auto& tensor : tensors) result.push_back(stay ? cast.parameter(tensor, narrow) : cast(tensor));
    return result;
  };
  return joint_linear(narrow, parameters(weights), parameters(biases), cast(rest));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, AutocastCPU, m) { m.impl("joint_linear", &joint_linear_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(dpa, AutocastCUDA, m) { m.impl("joint_linear", &joint_linear_autocast<at::kCUDA>); }

}  // namespace dpa
