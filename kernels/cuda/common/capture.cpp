#include "kernels/cuda/common/capture.h"

namespace dpa::kernels {

cudaError_t capture_id(cudaStream_t stream, unsigned long long* id) {
  auto status = cudaStreamCaptureStatusNone;
  const auto error = cudaStreamGetCaptureInfo(stream, &status, id);
  if (error != cudaSuccess || status != cudaStreamCaptureStatusActive) *id = 0;
  return error;
}

}  // namespace dpa::kernels
