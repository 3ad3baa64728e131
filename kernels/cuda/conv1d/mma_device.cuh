// What the kernels of mma_convolution.cuh and mma_wgrad.cuh have beside unet1d/phases_device.cuh: a test compiles them
// for the host (DPA_EMULATE), so they contain no PTX.
#pragma once
#include "kernels/cuda/unet1d/phases_device.cuh"

#ifndef DPA_EMULATE
namespace dpa::kernels::unet1d::device {
using ptx::copy_async_16_or_zeros;
}
#endif

namespace dpa::kernels::conv1d {

namespace device = unet1d::device;

template <class T>
constexpr bool kIsFloat = std::is_same_v<T, float>;
template <class T>
constexpr int kSize = kIsFloat<T> ? 4 : 2;  // bytes

// As the MMA multiplies it: float32 rounded to the nearest tf32.
template <class T>
DPA_DEVICE void round_operand(uint32_t& x) {
  if constexpr (kIsFloat<T>) x = device::to_tf32(device::as_float(x));
}

// A float32 number as the two tf32 numbers whose sum it is, to 2^-23 of it. What is left of infinity is NaN.
DPA_DEVICE void split_operand(uint32_t x, uint32_t& first, uint32_t& rest) {
  first = device::to_tf32(device::as_float(x));
  rest = device::to_tf32(device::as_float(x) - device::as_float(first));
}

// Rounds a sum to T and stores it.
template <class T>
DPA_DEVICE void store_rounded(void* to, int64_t at, float value) {
  if constexpr (kIsFloat<T>)
    static_cast<float*>(to)[at] = value;
  else
    static_cast<uint16_t*>(to)[at] = static_cast<uint16_t>(device::pack(T{}, value, 0.0f));
}

}  // namespace dpa::kernels::conv1d
