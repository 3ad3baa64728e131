// In ATen's ops, which a graph holds: dpa.tracking captures its comparison there. Values of one dtype that follow one
// another are gathered by one launch.
#include <ATen/ops/any.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ne.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "ops/values_differ/values_differ.h"

namespace dpa {
namespace {

Tensor values_differ_cuda(at::TensorList values, const Tensor& kept) {
  check_values_differ(values, kept);
  std::vector<Tensor> flat, bytes = {kept.narrow(0, 0, 0)};
  for (const auto& value : values) flat.push_back(value.reshape({-1}));
  for (auto first = flat.begin(); first != flat.end();) {
    const auto end = std::find_if(first, flat.end(),
                                  [&](const Tensor& value) { return value.scalar_type() != first->scalar_type(); });
    bytes.push_back(at::cat(at::TensorList(&*first, end - first)).view(at::kByte));
    first = end;
  }
  return at::any(at::ne(bytes.size() == 2 ? bytes[1] : at::cat(bytes), kept));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) { m.impl("values_differ", &values_differ_cuda); }

}  // namespace dpa
