// The arguments of the channels-last kernels (kernels/cuda/group_norm_mish/channels_last.h), for CUDA code.
#pragma once
#include "kernels/cuda/group_norm_mish/channels_last.h"
#include "ops/common/cuda.h"

namespace dpa {

/// But for the residual and what the kernels write. Tensors are as the kernels read them; weight, bias, scale and shift may be
/// undefined, and the input, where the caller knows it later.
inline kernels::channels_last::GroupNormMish norm_arguments(kernels::DType dtype, kernels::DType parameter_dtype,
                                                            const kernels::NormShape& shape,
                                                            const kernels::NormPlan& plan, double eps,
                                                            const Tensor& input, const Tensor& weight,
                                                            const Tensor& bias, const Tensor& scale,
                                                            const Tensor& shift) {
  const auto stride = [](const Tensor& rows) { return rows.defined() ? rows.stride(0) : 0; };
  return {dtype,
          parameter_dtype,
          shape,
          plan,
          eps,
          data_or_null(input),
          data_or_null(weight),
          data_or_null(bias),
          data_or_null(scale),
          data_or_null(shift),
          stride(scale),
          stride(shift),
          /*residual=*/nullptr,
          /*out=*/nullptr};
}

}  // namespace dpa
