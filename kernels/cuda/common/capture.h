// What CUDA's runtime calls differently in its versions 12 and 13. A library of ops runs on the runtime that torch brings,
// which may be of the other version than its headers; the kernels hold a runtime that fits theirs.
#pragma once

#include <cuda_runtime_api.h>

namespace dpa::kernels {

/// The capture that the stream is in, or 0.
cudaError_t capture_id(cudaStream_t stream, unsigned long long* id);

}  // namespace dpa::kernels
