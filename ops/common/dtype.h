// The kernels' name of a tensor's dtype.
#pragma once
#include "kernels/common/dtype.h"
#include "ops/common/check.h"

namespace dpa {

/// Of a dtype that a check has let through.
inline kernels::DType kernel_dtype(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return kernels::DType::kFloat64;
    case at::kFloat: return kernels::DType::kFloat32;
    case at::kHalf: return kernels::DType::kFloat16;
    case at::kBFloat16: return kernels::DType::kBFloat16;
    case at::kFloat8_e4m3fn: return kernels::DType::kFloat8E4M3;
    default: TORCH_INTERNAL_ASSERT(false, "dpa: unchecked dtype ", type);
  }
}

}  // namespace dpa
