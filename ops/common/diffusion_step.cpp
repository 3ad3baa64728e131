#include "ops/common/diffusion_step.h"

namespace dpa {

void check_step(const StepNames& names, const Tensor& model_output, const Tensor& sample, const Tensor& table,
                const Tensor& index, const OptionalTensor& noise) {
  const auto* op = names.op;
  check_floating(op, "sample", sample);
  check_same(op, "model_output", model_output, "sample", sample);
  if (noise.has_value()) check_same(op, names.noise, *noise, "sample", sample);

  check_same_device(op, names.table, table, "sample", sample);
  const auto type = table.scalar_type();
  DPA_CHECK(type == sample.scalar_type() || type == accumulate_type(sample.scalar_type()), op,
            c10::str(names.table, " must have the dtype of sample (", sample.scalar_type(),
                     "), or float32 beside 16-bit samples"),
            type);
  const bool square = table.dim() == 2 && table.sym_size(1) == names.columns;
  const bool flat = names.flat_table && table.dim() == 1 && table.sym_size(0) % names.columns == 0;
  DPA_CHECK(square || flat, op,
            c10::str(names.table, " must have shape (N, ", names.columns, ")",
                     names.flat_table ? c10::str(" or (N * ", names.columns, ")") : std::string()),
            table.sym_sizes());
  DPA_CHECK(table.sym_size(0) >= 1, op, c10::str(names.table, " must have at least one row"), table.sym_sizes());
  check_row_index(op, names.index, index, sample);
}

StepInputs::StepInputs(const Tensor& model_output_, const Tensor& sample_, const Tensor& table_, const Tensor& index_,
                       const OptionalTensor& noise_, int64_t columns) {
  model_output = model_output_.contiguous();
  sample = sample_.contiguous();
  noise = value_or_undefined(noise_);
  if (noise.defined()) noise = noise.contiguous();
  table = table_.to(accumulate_type(sample.scalar_type())).contiguous();
  index = index_.to(at::kLong).contiguous().view(-1);
  batch = index.numel();
  inner = batch > 0 ? sample.numel() / batch : 0;
  rows = table.numel() / columns;
}

}  // namespace dpa
