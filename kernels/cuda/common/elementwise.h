// What the launchers of element-wise ops of two inputs take.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace dpa::kernels {

/// out = f(a, b), element by element. Dimensions run from the fastest to the slowest; strides are in bytes and may be
/// zero in the inputs. One dimension whose strides are the element size is the contiguous case, which is vectorised.
struct Elementwise {
  static constexpr int kMaxDims = 16;
  DType dtype;
  void* out;
  const void *a, *b;
  int64_t count;
  int dims;
  int64_t sizes[kMaxDims];
  int64_t strides[3][kMaxDims];  // of out, a, b
  bool contiguous;
};

}  // namespace dpa::kernels
