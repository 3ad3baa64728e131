#include "ops/common/check.h"

namespace dpa {

void check_floating(const char* op, const char* name, const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  DPA_CHECK(type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16, op,
            c10::str(name, " must be float64, float32, float16 or bfloat16"), type);
}

void check_same_device(const char* op, const char* name, const Tensor& tensor, const char* reference_name,
                       const Tensor& reference) {
  DPA_CHECK(tensor.defined(), op, c10::str(name, " must be a tensor"), "None");
  DPA_CHECK(tensor.device() == reference.device(), op,
            c10::str(name, " must be on the device of ", reference_name, " (", reference.device(), ")"),
            tensor.device());
}

void check_same_type(const char* op, const char* name, const Tensor& tensor, const char* reference_name,
                     const Tensor& reference) {
  DPA_CHECK(tensor.scalar_type() == reference.scalar_type(), op,
            c10::str(name, " must have the dtype of ", reference_name, " (", reference.scalar_type(), ")"),
            tensor.scalar_type());
}

void check_same(const char* op, const char* name, const Tensor& tensor, const char* reference_name,
                const Tensor& reference) {
  check_same_device(op, name, tensor, reference_name, reference);
  check_same_type(op, name, tensor, reference_name, reference);
  DPA_CHECK(tensor.sym_sizes().equals(reference.sym_sizes()), op,
            c10::str(name, " must have the shape of ", reference_name, " ", reference.sym_sizes()), tensor.sym_sizes());
}

void check_shape(const char* op, const char* name, const Tensor& tensor, c10::SymIntArrayRef sizes, const char* spelled,
                 const char* reference_name, const Tensor& reference) {
  check_same_device(op, name, tensor, reference_name, reference);
  check_same_type(op, name, tensor, reference_name, reference);
  DPA_CHECK(tensor.sym_sizes().equals(sizes), op, c10::str(name, " must have shape ", spelled, " = ", sizes),
            tensor.sym_sizes());
}

void check_shape(const char* op, const char* name, const OptionalTensor& tensor, c10::SymIntArrayRef sizes,
                 const char* spelled, const char* reference_name, const Tensor& reference) {
  if (tensor.has_value()) check_shape(op, name, *tensor, sizes, spelled, reference_name, reference);
}

void check_parameter_type(const char* op, const char* name, const Tensor& parameter, const Tensor& input) {
  check_same_device(op, name, parameter, "input", input);
  if (parameter.scalar_type() == at::kFloat && accumulate_type(input.scalar_type()) == at::kFloat) return;
  check_same_type(op, name, parameter, "input", input);
}

void check_parameter(const char* op, const char* name, const OptionalTensor& parameter, const c10::SymInt& channels,
                     const char* spelled, const Tensor& input) {
  if (!parameter.has_value()) return;
  check_parameter_type(op, name, *parameter, input);
  DPA_CHECK(parameter->dim() == 1 && parameter->sym_size(0) == channels, op,
            c10::str(name, " must have shape ", spelled, " = [", channels, "]"), parameter->sym_sizes());
}

bool is_countable(std::initializer_list<c10::SymInt> sizes) {
  int64_t bytes = 16;  // of the widest element
  for (const auto& size : sizes) {
    const auto n = size.maybe_as_int();
    if (n.has_value() && __builtin_mul_overflow(bytes, std::max<int64_t>(*n, 1), &bytes)) return false;
  }
  return true;
}

void check_convolution(const char* op, const char* name, const Tensor& weight) {
  DPA_CHECK(weight.sym_size(0) >= 1 && weight.sym_size(1) >= 1, op,
            c10::str(name, " must have at least one channel each way"), weight.sym_sizes());
}

void check_row_index(const char* op, const char* name, const Tensor& index, const Tensor& sample) {
  DPA_CHECK(at::isIntegralType(index.scalar_type(), /*includeBool=*/false), op,
            c10::str(name, " must be an integer tensor"), index.scalar_type());
  check_same_device(op, name, index, "sample", sample);
  const bool one = index.dim() == 0 || (index.dim() == 1 && index.sym_size(0) == 1);
  DPA_CHECK(one || (index.dim() == 1 && sample.dim() > 0 && index.sym_size(0) == sample.sym_size(0)), op,
            c10::str(name, " must have one element, or one for each of the rows of sample ", sample.sym_sizes()),
            "shape ", index.sym_sizes());
}

void check_row_range(const char* op, const char* name, const Tensor& index, int64_t rows) {
  const auto contiguous = index.to(at::kLong).contiguous();
  const int64_t* values = contiguous.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < contiguous.numel(); ++i)
    DPA_CHECK(values[i] >= 0 && values[i] < rows, op, c10::str(name, " must lie in 0..", rows - 1), values[i]);
}

}  // namespace dpa
