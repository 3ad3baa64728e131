// The functions of a gated cell: exp(x) - 1, tanh(x), 1 / (1 + exp(-x)). On the host the float ones have neither
// branches nor calls, so that loops over them vectorise. NaN stays NaN.
#pragma once
#include <cmath>

#include "kernels/math/host_device.h"
#include "kernels/math/mish.h"

namespace dpa::math {

#ifdef __CUDA_ARCH__
DPA_HOST_DEVICE float exponential_minus_1(float x) { return ::expm1f(x); }
DPA_HOST_DEVICE float hyperbolic_tangent(float x) { return ::tanhf(x); }
DPA_HOST_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + ::expf(-x)); }
#else
/// For x <= 88, to 4 units in the last place: near zero the scale is 1 and what remains is the tail.
DPA_HOST_DEVICE float exponential_minus_1(float x) {
  const ScaledExponential e(x < -87.0f ? -87.0f : x);
  return e.scale * e.tail + (e.scale - 1.0f);
}
/// From 10 on tanh is 1 to the last bit.
DPA_HOST_DEVICE float hyperbolic_tangent(float x) {
  const float below = x > 10.0f ? 10.0f : x, limited = below < -10.0f ? -10.0f : below;
  const float e = exponential_minus_1(2.0f * limited);
  return e / (e + 2.0f);
}
/// Below -87, where results leave the normal range, it is zero.
DPA_HOST_DEVICE float sigmoid(float x) {
  const bool vanishes = x < -87.0f;
  const float e = exponential(vanishes ? 87.0f : -x);
  return vanishes ? 0.0f : 1.0f / (1.0f + e);
}
#endif
DPA_HOST_DEVICE double exponential_minus_1(double x) { return ::expm1(x); }
DPA_HOST_DEVICE double hyperbolic_tangent(double x) { return ::tanh(x); }
DPA_HOST_DEVICE double sigmoid(double x) { return 1.0 / (1.0 + ::exp(-x)); }

}  // namespace dpa::math
