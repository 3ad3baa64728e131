// mish(x) = x * tanh(log(1 + exp(x))) and its derivative, without tanh or log:
// with e = exp(x) and n = e * (e + 2), tanh(log(1 + e)) = n / (n + 2). From x = 20 on the quotient is 1 in float32 and
// in float64, so limiting the exponent there changes nothing and keeps e^4 finite.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/math/host_device.h"

namespace dpa::math {

#ifdef __CUDA_ARCH__
DPA_HOST_DEVICE float exponential(float x) { return ::expf(x); }
#else
/// exp(x) = scale * (1 + tail), for -87 <= x <= 88, to 2 units in the last place, without a branch or a call, so that
/// loops over it vectorise: scale = 2^k, tail = exp(r) - 1, |r| <= log(2) / 2. Adding 1.5 * 2^23 rounds to the integer
/// k and leaves it in the low bits.
struct ScaledExponential {
  float scale, tail;

  DPA_HOST_DEVICE explicit ScaledExponential(float x) {
    constexpr float kMagic = 12582912.0f;
    const float shifted = x * 1.44269504f + kMagic;
    const float k = shifted - kMagic;
    const float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    tail = p * r * r + r;
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    std::memcpy(&scale, &bits, sizeof scale);
  }
};

/// exp(x) for x <= 88. Below -87, where results leave the normal range, it is zero.
DPA_HOST_DEVICE float exponential(float x) {
  const bool vanishes = x < -87.0f;
  const ScaledExponential e(vanishes ? -87.0f : x);
  return vanishes ? 0.0f : (e.tail + 1.0f) * e.scale;
}
#endif
DPA_HOST_DEVICE double exponential(double x) { return ::exp(x); }

/// mish(x); NaN stays NaN.
template <class A>
DPA_HOST_DEVICE A mish(A x) {
  const A e = exponential(x < A(20) ? x : A(20));
  const A n = e * (e + A(2));
  return x * (n / (n + A(2)));
}

/// d mish(x) / dx; NaN stays NaN.
template <class A>
DPA_HOST_DEVICE A mish_derivative(A x) {
  const A limited = x > A(20) ? A(20) : x;
  const A e = exponential(limited);
  const A n = e * (e + A(2)), m = n + A(2);
  return n / m + limited * (A(4) * e * (e + A(1)) / (m * m));
}

}  // namespace dpa::math
