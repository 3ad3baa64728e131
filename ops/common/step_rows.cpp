#include "ops/common/step_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

namespace dpa {

StepRows::StepRows(const StepNames& names, const Tensor& sample, const Tensor& table, const Tensor& index)
    : sample_(sample), table_(table), index_(index.to(at::kLong).reshape({-1})), columns_(names.columns) {
  selected_ = widen(table).reshape({-1, columns_}).index_select(0, index_);
}

Tensor StepRows::broadcast(const Tensor& tensor) const {
  std::vector<c10::SymInt> shape(sample_.dim(), 1);
  if (!shape.empty()) shape[0] = index_.sym_size(0);
  return tensor.reshape_symint(shape);
}

Tensor StepRows::operator[](int64_t column) const { return broadcast(selected_.select(1, column)); }

Tensor StepRows::sum_by_row(const std::vector<Tensor>& columns) const {
  std::vector<Tensor> sums;
  for (const auto& column : columns)
    sums.push_back(column.expand_symint(sample_.sym_sizes()).reshape_symint({index_.sym_size(0), -1}).sum(1));
  const auto zeros = at::zeros_symint({table_.sym_numel() / columns_, columns_}, selected_.options());
  return zeros.index_add(0, index_, at::stack(sums, 1)).to(table_.scalar_type()).reshape_symint(table_.sym_sizes());
}

}  // namespace dpa
