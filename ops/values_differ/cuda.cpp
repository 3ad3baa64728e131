// In ATen's ops, which a graph holds: dpa.tracking captures its comparison there.
#include <ATen/ops/any.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ne.h>
#include <torch/library.h>

#include <vector>

#include "ops/values_differ/values_differ.h"

namespace dpa {
namespace {

Tensor values_differ_cuda(at::TensorList values, const Tensor& kept) {
  check_values_differ(values, kept);
  std::vector<Tensor> bytes = {kept.narrow(0, 0, 0)};
  for (const auto& value : values) bytes.push_back(at::cat({value.reshape({-1})}).view(at::kByte));
  return at::any(at::ne(at::cat(bytes), kept));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) { m.impl("values_differ", &values_differ_cuda); }

}  // namespace dpa
