// On the CPU the op and its backward are ATen's, in the order of the input.
#include <torch/library.h>

#include "ops/group_norm_act/group_norm_act.h"

namespace dpa {

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("group_norm_act", &group_norm_act_by_aten);
  m.impl("group_norm_act_backward", &group_norm_act_backward_by_aten);
}

}  // namespace dpa
