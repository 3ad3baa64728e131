// The coefficients of a step in ATen ops, for the formulas of `denoise` and `scheduler_step`.
#pragma once
#include <vector>

#include "ops/common/diffusion_step.h"

namespace dpa {

/// Each sample's row of the table. `rows[c]` is column c, shaped to broadcast against the sample.
class StepRows {
 public:
  StepRows(const StepNames& names, const Tensor& sample, const Tensor& table, const Tensor& index);

  Tensor operator[](int64_t column) const;
  /// A tensor with one element, or one a row of the sample, shaped to broadcast against the sample.
  Tensor broadcast(const Tensor& tensor) const;
  /// To the dtype of the arithmetic and back.
  Tensor widen(const Tensor& tensor) const { return tensor.to(accumulate_type(sample_.scalar_type())); }
  Tensor narrow(const Tensor& tensor) const { return tensor.to(sample_.scalar_type()); }
  /// The table's gradient, of its shape and dtype, from each element's share in each column.
  Tensor sum_by_row(const std::vector<Tensor>& columns) const;

 private:
  Tensor sample_, table_, index_, selected_;
  int64_t columns_;
};

}  // namespace dpa
