#include "ops/common/cuda.h"

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "kernels/cuda/values_differ/values_differ.h"
#include "ops/values_differ/values_differ.h"

namespace dpa {
namespace {

constexpr int64_t kWord = 8, kMostElements = 1 << 30;  // bytes of an element and elements of a view, at most

Tensor values_differ_cuda(at::TensorList values, const Tensor& kept) {
  check_values_differ(values, kept);
  const c10::cuda::CUDAGuard guard(kept.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto answer = at::zeros({}, kept.options().dtype(at::kBool));
  kernels::Views views = {};
  views.kept = data_or_null(kept), views.differ = answer.mutable_data_ptr<bool>();
  const auto launch = [&] {
    if (views.count > 0) C10_CUDA_CHECK(kernels::values_differ(views, stream));
    views.count = 0;
  };
  const auto add = [&](const char* data, int64_t stride, int64_t place, int64_t count, int64_t size) {
    for (int64_t i = 0; i < count; i += kMostElements) {
      views.of[views.count++] = {data + i * stride, stride, place + i * size,
                                 static_cast<int32_t>(std::min(kMostElements, count - i)), static_cast<int32_t>(size)};
      if (views.count == kernels::kMostViews) launch();
    }
  };
  int64_t place = 0;
  for (const auto& value : values) {
    const int64_t size = value.element_size(), count = value.numel();
    const auto* const data = static_cast<const char*>(value.const_data_ptr());
    const int64_t stride = value.dim() == 0 ? size : value.stride(0) * size;
    if (size <= kWord) {
      add(data, stride, place, count, size);
    } else if (stride == size) {
      add(data, kWord, place, count * size / kWord, kWord);
    } else {
      for (int64_t i = 0; i < count; i++) add(data + i * stride, kWord, place + i * size, size / kWord, kWord);
    }
    place += count * size;
  }
  launch();
  return answer;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) { m.impl("values_differ", &values_differ_cuda); }

}  // namespace dpa
