// A float32 number x as two float16 numbers, for the matrix instructions: x scale = high + low / kLowScale, but for
// 2^-23 of it. Two such numbers multiplied are high high + (high low + low high) / kLowScale, each sum in an
// accumulator of its own, or the second one scaled first. With these scales a weight is below 4095 and an activation
// below 1e6; below 4e-6 and 1e-3 numbers keep fewer bits, but their errors stay below 2^-40 and 2^-32.
#pragma once

namespace dpa::math {

constexpr float kLowScale = 2048.0f;  // what is below a float16 has at most 2^-11 of it
constexpr float kWeightScale = 16.0f, kActivationScale = 1.0f / kWeightScale;

}  // namespace dpa::math
