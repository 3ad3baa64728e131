// Elements are read where they lie: spread over weights that are in no cache, they cost a miss each. So loops go on where
// a value differs, branch-free, many misses are under way at once, and several threads have theirs.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <vector>

#include "ops/values_differ/values_differ.h"

namespace dpa {
namespace {

template <class Word>
bool differ(const char* values, int64_t stride, const char* kept, int64_t count) {
  Word found = 0;
  for (int64_t i = 0; i < count; ++i) {
    Word value, other;  // bytes may begin anywhere
    std::memcpy(&value, values + i * stride, sizeof(Word));
    std::memcpy(&other, kept + i * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
    found |= value ^ other;
  }
  return found != 0;
}

bool differ(const Tensor& values, const char* kept) {
  const auto size = static_cast<int64_t>(values.element_size()), count = values.numel();
  const auto* const data = static_cast<const char*>(values.const_data_ptr());
  const int64_t stride = values.dim() == 0 ? size : values.stride(0) * size;
  if (stride == size || count == 1) return std::memcmp(data, kept, count * size) != 0;
  switch (size) {
    case 1: return differ<uint8_t>(data, stride, kept, count);
    case 2: return differ<uint16_t>(data, stride, kept, count);
    case 4: return differ<uint32_t>(data, stride, kept, count);
    case 8: return differ<uint64_t>(data, stride, kept, count);
    default:  // complex
      for (int64_t i = 0; i < count; ++i)
        if (std::memcmp(data + i * stride, kept + i * size, size) != 0) return true;
      return false;
  }
}

constexpr int64_t kElementsOfAThread = 4096;

Tensor values_differ_cpu(at::TensorList values, const Tensor& kept) {
  check_values_differ(values, kept);
  const auto count = static_cast<int64_t>(values.size());
  std::vector<int64_t> places(count);
  int64_t bytes = 0, elements = 0;
  for (int64_t i = 0; i < count; ++i) {
    places[i] = bytes;
    bytes += static_cast<int64_t>(values[i].nbytes()), elements += values[i].numel();
  }
  const auto* const data = static_cast<const char*>(kept.const_data_ptr());
  std::atomic<bool> found = false;
  const int64_t grain = elements == 0 ? count : count * kElementsOfAThread / elements + 1;
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && !found.load(std::memory_order_relaxed); ++i)
      if (values[i].numel() > 0 && differ(values[i], data + places[i])) found.store(true, std::memory_order_relaxed);
  });
  auto answer = at::empty({}, kept.options().dtype(at::kBool));
  *answer.mutable_data_ptr<bool>() = found.load();
  return answer;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) { m.impl("values_differ", &values_differ_cpu); }

}  // namespace dpa
