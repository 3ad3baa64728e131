// What the kernels share: Mish with the precision that a 16-bit result needs, and the choice of types.
#pragma once
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/reduce.cuh"
#include "kernels/cuda/group_norm_mish/channels_last.h"

namespace dpa::kernels::channels_last {

/// mish(u) and its derivative at once: with e = exp(u), n = e (e + 2) and m = n + 2, mish = u n / m and
/// mish' = n / m + 4 u e (e + 1) / m^2 (kernels/math/mish.h).
///
/// The exponential and the quotient are the processor's approximations, with relative errors of about 2^-22 + |u| 2^-24
/// and 2^-23, against 2^-9 or 2^-12 that rounding the result to 16 bits costs, or 2^-11 for a tf32.
struct Mish {
  float value, slope;

  __device__ __forceinline__ explicit Mish(float u) {
    const float power = ptx::min_or_nan(u * 1.44269504f, 28.8539008f);  // of 2; from 20 on the quotient is 1
    const float e = ptx::exp2_approx(power), n = e * (e + 2.0f), r = ptx::reciprocal_approx(n + 2.0f), t = n * r;
    value = u * t;
    slope = fmaf(power * r, fmaf(e, e, e) * r * 2.77258872f, t);  // 4 log(2)
  }
};

/// Calls `f(TypeTag<T>, TypeTag<P>)` with the types of the tensors and of the parameters.
template <class Args, class F>
cudaError_t dispatch_types(const Args& args, F&& f) {
  const auto with = [&](auto tag) {
    if (args.parameter_dtype == args.dtype) return f(tag, tag);
    if (args.parameter_dtype == DType::kFloat32) return f(tag, TypeTag<float>{});
    return cudaErrorInvalidValue;
  };
  return dispatch_to_32_bits(args.dtype, with);
}

}  // namespace dpa::kernels::channels_last
