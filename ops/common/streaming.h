// Memory for packed weights on the CPU.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zero.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace dpa {

/// Zeros for weights that every step streams through: in huge pages where the system has them. Without them a step
/// takes a seventh longer (docs/cpu-log.md). What lies between two weights goes into files and must not be what the
/// memory held before.
inline at::Tensor zeros_for_streaming(int64_t bytes, const at::TensorOptions& options) {
  auto tensor = at::empty({bytes}, options.dtype(at::kByte));
#ifdef __linux__
  constexpr uintptr_t kHuge = uintptr_t{1} << 21;
  const auto begin = (reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr()) + kHuge - 1) / kHuge * kHuge;
  const auto end = (reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr()) + bytes) / kHuge * kHuge;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  return tensor.zero_();
}

}  // namespace dpa
