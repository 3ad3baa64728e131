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

// `padded` (shape.h) in a kernel.
DPA_DEVICE int64_t padded_channels(int64_t channels) { return (channels + 7) / 8 * 8; }

// As the MMA multiplies it: float32 rounded to the nearest tf32.
template <class T>
DPA_DEVICE void round_operand(uint32_t& x) {
  if constexpr (kIsFloat<T>) x = device::to_tf32(device::as_float(x));
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
