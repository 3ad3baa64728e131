// On the CPU the ops are ATen's, in the order of the input.
#include <torch/library.h>

#include "ops/batch_norm_act/batch_norm_act.h"

namespace dpa {
namespace {

Tensor batch_norm_act_cpu(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                          const OptionalTensor& residual, bool relu) {
  return std::get<0>(batch_norm_act_by_aten(input, weight, bias, eps, residual, relu));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("batch_norm_act", &batch_norm_act_cpu);
  m.impl("batch_norm_act_forward", &batch_norm_act_by_aten);
  m.impl("batch_norm_act_backward", &batch_norm_act_backward_by_aten);
}

}  // namespace dpa
