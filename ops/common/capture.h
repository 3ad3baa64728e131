// Whether work is being recorded, for host code that is built with and without CUDA.
#pragma once
#include <ATen/core/Tensor.h>
#ifdef DPA_WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace dpa {

/// Whether what is done with `tensor` now becomes part of a CUDA graph.
inline bool is_captured([[maybe_unused]] const at::Tensor& tensor) {
#ifdef DPA_WITH_CUDA
  return tensor.is_cuda() && c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
#else
  return false;
#endif
}

}  // namespace dpa
