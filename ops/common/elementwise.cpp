#include "ops/common/elementwise.h"

namespace dpa {

void check_pair(const char* op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b) {
  check_floating(op, a_name, a);
  check_same(op, b_name, b, a_name, a);
}

at::TensorIterator binary_iterator(const Tensor& out, const Tensor& a, const Tensor& b) {
  return at::TensorIteratorConfig()
      .set_check_mem_overlap(true)
      .resize_outputs(false)
      .add_output(out)
      .add_const_input(a)
      .add_const_input(b)
      .build();
}

}  // namespace dpa
