// Element types inside kernels: the type to store, the type to compute in, and the way between.
// Conversions are spelled with intrinsics, because PyTorch's just-in-time builds turn the operators of half types off.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/dtype.h"

namespace dpa::kernels {

/// The type of arithmetic on stored values of type `T`: float for 16-bit types.
template <class T>
struct AccumulateOf {
  using type = T;
};
template <>
struct AccumulateOf<__half> {
  using type = float;
};
template <>
struct AccumulateOf<__nv_bfloat16> {
  using type = float;
};
template <class T>
using Accumulate = typename AccumulateOf<T>::type;

__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

/// `x` rounded to the nearest value of type `T`.
template <class T>
__device__ __forceinline__ T narrow(Accumulate<T> x);
template <>
__device__ __forceinline__ double narrow<double>(double x) {
  return x;
}
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

/// Two values rounded to `T`, __half or __nv_bfloat16, in one word: `low` in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}
template <class T>
__device__ __forceinline__ float2 unpack_pair(uint32_t pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000)};
  else
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

/// Neighbouring elements that move as one.
template <class T, int Width>
struct alignas(sizeof(T) * Width) Vector {
  T data[Width];
};

template <class T>
struct TypeTag {
  using type = T;
};

/// The DType of a C++ type; of e4m3 any type of a byte.
template <class T>
constexpr DType kDTypeOf = std::is_same_v<T, double>          ? DType::kFloat64
                           : std::is_same_v<T, float>         ? DType::kFloat32
                           : std::is_same_v<T, __half>        ? DType::kFloat16
                           : std::is_same_v<T, __nv_bfloat16> ? DType::kBFloat16
                                                              : DType::kFloat8E4M3;

/// Calls `f(TypeTag<T>{})` with the C++ type of `dtype`, which is one of `Types`.
template <class... Types, class F>
cudaError_t dispatch_among(DType dtype, F&& f) {
  cudaError_t error = cudaErrorInvalidValue;
  ((dtype == kDTypeOf<Types> && (error = f(TypeTag<Types>{}), true)) || ...);
  return error;
}
/// Calls `f(std::integral_constant<int, value>{})`, where `value` is one of `kValues`.
template <int... kValues, class F>
cudaError_t dispatch_value(int value, F&& f) {
  cudaError_t error = cudaErrorInvalidValue;
  ((value == kValues && (error = f(std::integral_constant<int, kValues>{}), true)) || ...);
  return error;
}
/// The types of arithmetic; those of at most 32 bits; those of 16 bits.
template <class F>
cudaError_t dispatch(DType dtype, F&& f) {
  return dispatch_among<double, float, __half, __nv_bfloat16>(dtype, f);
}
template <class F>
cudaError_t dispatch_to_32_bits(DType dtype, F&& f) {
  return dispatch_among<__nv_bfloat16, __half, float>(dtype, f);
}
template <class F>
cudaError_t dispatch_half(DType dtype, F&& f) {
  return dispatch_among<__nv_bfloat16, __half>(dtype, f);
}

}  // namespace dpa::kernels
