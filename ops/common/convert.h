// 16-bit numbers and bytes to float, and 16-bit numbers back, one at a time, without branches: loops over them
// vectorise, which those over c10's conversions of bfloat16 do not. float and double stay as they are.
#pragma once
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#include "ops/common/vectorize.h"

namespace dpa {

DPA_ALWAYS_INLINE double widen(double x) { return x; }
DPA_ALWAYS_INLINE float widen(float x) { return x; }
DPA_ALWAYS_INLINE float widen(uint8_t x) { return x; }
DPA_ALWAYS_INLINE float widen(c10::Half x) { return c10::detail::fp16_ieee_to_fp32_value(x.x); }
DPA_ALWAYS_INLINE float widen(c10::BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// To the nearest, ties to even; NaN stays NaN.
DPA_ALWAYS_INLINE void narrow(double x, double& to) { to = x; }
DPA_ALWAYS_INLINE void narrow(float x, float& to) { to = x; }
DPA_ALWAYS_INLINE void narrow(float x, c10::Half& to) { to.x = c10::detail::fp16_ieee_from_fp32_value(x); }
DPA_ALWAYS_INLINE void narrow(float x, c10::BFloat16& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to.x = static_cast<uint16_t>(x == x ? rounded : 0x7fc0u);
}

}  // namespace dpa
