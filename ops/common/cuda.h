// What the CUDA side of an op needs of PyTorch: the current stream under a device guard, allocation, the error check.
// Only files built with CUDA include this.
#pragma once
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "ops/common/check.h"
#include "ops/common/dtype.h"

namespace dpa {

/// The address of the data, or null for an undefined tensor.
inline const void* data_or_null(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
inline void* mutable_data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

/// Kernels that read vectors want addresses aligned to 16 bytes; a fresh copy is aligned to more.
inline bool is_aligned(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0; }
inline Tensor aligned(const Tensor& tensor) { return is_aligned(tensor) ? tensor : tensor.clone(); }

/// What kernels use between them, undefined where that is nothing.
inline Tensor workspace(int64_t bytes, const Tensor& like) {
  return bytes == 0 ? Tensor() : at::empty({bytes}, like.options().dtype(at::kByte));
}

/// A (B, C) tensor, or an undefined one, as rows that begin at 16 bytes. They may lie apart: a piece of a wider tensor,
/// such as of FiLM's output, is read in place.
inline Tensor aligned_rows(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const bool rows = tensor.stride(1) == 1 && tensor.stride(0) * tensor.element_size() % 16 == 0;
  return rows && is_aligned(tensor) ? tensor : aligned(tensor.contiguous());
}

}  // namespace dpa
