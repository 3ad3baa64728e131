// The vocabulary of input checks. Every message reads `dpa::op: argument must ..., got ...`.
//
// Each op has one check, called by its CPU, CUDA and Meta kernels, so it runs beneath autograd, in inference mode too.
// Sizes are symbolic: under torch.compile a check becomes a guard and does not pin a size to its value.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/Optional.h>

/// Raises unless `condition`. `rule` names the argument and what it must be; the rest is the received value.
#define DPA_CHECK(condition, op, rule, ...) TORCH_CHECK(condition, "dpa::", op, ": ", rule, ", got ", __VA_ARGS__)

namespace dpa {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// The type in which values of `type` are accumulated: float32 for 16-bit types, else the type itself.
inline at::ScalarType accumulate_type(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

/// `tensor` has one of the four floating dtypes.
void check_floating(const char* op, const char* name, const Tensor& tensor);

/// `tensor` is there, on the device of `reference`, and of its dtype.
void check_same_device(const char* op, const char* name, const Tensor& tensor, const char* reference_name,
                       const Tensor& reference);
void check_same_type(const char* op, const char* name, const Tensor& tensor, const char* reference_name,
                     const Tensor& reference);

/// `tensor` has the shape, dtype and device of `reference`.
void check_same(const char* op, const char* name, const Tensor& tensor, const char* reference_name,
                const Tensor& reference);

/// `tensor` has the shape `sizes`, spelled `spelled` in the message, and the dtype and device of `reference`.
void check_shape(const char* op, const char* name, const Tensor& tensor, c10::SymIntArrayRef sizes, const char* spelled,
                 const char* reference_name, const Tensor& reference);

/// The same for an argument that may be absent.
void check_shape(const char* op, const char* name, const OptionalTensor& tensor, c10::SymIntArrayRef sizes,
                 const char* spelled, const char* reference_name, const Tensor& reference);

/// A parameter is on the device of `input` and of its dtype, or float32 beside 16-bit activations: training in mixed
/// precision keeps it so.
void check_parameter_type(const char* op, const char* name, const Tensor& parameter, const Tensor& input);

/// The same for one number a channel, which may be absent; `spelled` is the shape in the message.
void check_parameter(const char* op, const char* name, const OptionalTensor& parameter, const c10::SymInt& channels,
                     const char* spelled, const Tensor& input);

/// Whether 64 bits count the bytes of a tensor of these sizes. Symbolic ones are those of real tensors.
bool is_countable(std::initializer_list<c10::SymInt> sizes);

/// The weight of a convolution has at least one channel each way, as PyTorch's convolutions want it.
void check_convolution(const char* op, const char* name, const Tensor& weight);

/// `index` holds integers: one element, or one for each of the rows of `sample`; on the device of `sample`.
void check_row_index(const char* op, const char* name, const Tensor& index, const Tensor& sample);

/// On the CPU, every element of `index` lies in 0..rows-1. (On the GPU the kernels answer NaN instead, since reading
/// the value here would stop the host.)
void check_row_range(const char* op, const char* name, const Tensor& index, int64_t rows);

/// The tensor, or an undefined one where it is absent.
inline Tensor value_or_undefined(const OptionalTensor& tensor) { return tensor.has_value() ? *tensor : Tensor(); }

/// An absent argument where the tensor is undefined.
inline OptionalTensor as_optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

}  // namespace dpa
