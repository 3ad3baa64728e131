// What the element-wise ops of two inputs share: one TensorIterator that lays out any strides without a copy, the CPU
// loop over it, and the way from it to a CUDA launch.
#pragma once
#include <ATen/Dispatch.h>
#include <ATen/TensorIterator.h>

#include "ops/common/check.h"
#include "ops/common/convert.h"

namespace dpa {

/// Checks that `b` matches `a`, which is floating.
void check_pair(const char* op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b);

/// The result of an element-wise op keeps the strides of `a` where they are dense, as PyTorch's own do.
at::TensorIterator binary_iterator(const Tensor& out, const Tensor& a, const Tensor& b);

/// out[i] = f(a[i], b[i]) for `count` neighbours. 16-bit numbers are widened a block at a time, because the compiler
/// makes vector code of the conversions and of f apart, but not of both in one loop.
template <class T, class F>
void binary_row(T* out, const T* a, const T* b, int64_t count, const F& f) {
  if constexpr (std::is_same_v<T, double> || std::is_same_v<T, float>) {
    for (int64_t i = 0; i < count; ++i) out[i] = f(a[i], b[i]);
  } else {
    constexpr int64_t kBlock = 512;
    float x[kBlock], y[kBlock];
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t n = std::min(kBlock, count - begin);
      widen(a + begin, x, n);
      widen(b + begin, y, n);
      for (int64_t i = 0; i < n; ++i) x[i] = f(x[i], y[i]);
      narrow(x, out + begin, n);
    }
  }
}

/// out[i] = f(a[i], b[i]), with arithmetic in float32 for 16-bit types.
template <class F>
void binary_cpu(at::TensorIterator& iterator, const F& f) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, iterator.common_dtype(), "dpa::binary", [&] {
    using A = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    iterator.for_each([&](char** data, const int64_t* strides, int64_t n) {
      constexpr int64_t kSize = sizeof(scalar_t);
      if (strides[0] == kSize && strides[1] == kSize && strides[2] == kSize)
        return binary_row(reinterpret_cast<scalar_t*>(data[0]), reinterpret_cast<const scalar_t*>(data[1]),
                          reinterpret_cast<const scalar_t*>(data[2]), n, f);
      char *out = data[0], *a = data[1], *b = data[2];
      for (int64_t i = 0; i < n; ++i)
        *reinterpret_cast<scalar_t*>(out + i * strides[0]) =
            static_cast<scalar_t>(f(static_cast<A>(*reinterpret_cast<const scalar_t*>(a + i * strides[1])),
                                    static_cast<A>(*reinterpret_cast<const scalar_t*>(b + i * strides[2]))));
    });
  });
}

}  // namespace dpa
