// What the kernels share: Mish with the precision that a 16-bit result needs, and the choice of types.
#pragma once
#include "kernels/common/dtype.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/reduce.cuh"
#include "kernels/group_norm_mish/channels_last.h"

namespace dpa::kernels::channels_last {

/// mish(u) and its derivative at once: with e = exp(u), n = e (e + 2) and m = n + 2, mish = u n / m and
/// mish' = n / m + 4 u e (e + 1) / m^2 (kernels/math/mish.h).
///
/// The exponential and the quotient are the processor's approximations, with relative errors of about 2^-22 + |u| 2^-24
/// and 2^-22, against 2^-9 or 2^-12 that rounding the result costs.
template <class T>
struct Mish {
  static_assert(sizeof(T) == 2, "the approximations are for results of 16 bits");
  float value, slope;

  __device__ __forceinline__ explicit Mish(float u) {
    const float limited = u > 20.0f ? 20.0f : u;  // NaN stays NaN
    const float e = __expf(limited), n = e * (e + 2.0f), r = __fdividef(1.0f, n + 2.0f), t = n * r;
    value = u * t;
    slope = fmaf(4.0f * limited * r, fmaf(e, e, e) * r, t);
  }
};

/// Calls `f(TypeTag<T>, TypeTag<P>)` with the types of the tensors and of the parameters.
template <class F>
cudaError_t dispatch_types(const GroupNormMish& args, F&& f) {
  const auto with = [&](auto tag) {
    if (args.parameter_dtype == args.dtype) return f(tag, tag);
    if (args.parameter_dtype == DType::kFloat32) return f(tag, TypeTag<float>{});
    return cudaErrorInvalidValue;
  };
  switch (args.dtype) {
    case DType::kBFloat16: return with(TypeTag<__nv_bfloat16>{});
    case DType::kFloat16: return with(TypeTag<__half>{});
    default: return cudaErrorInvalidValue;
  }
}

/// Adds up the partial sums of a backward that has them.
cudaError_t add_slices(const GroupNormMishBackward& args, cudaStream_t stream);

}  // namespace dpa::kernels::channels_last
