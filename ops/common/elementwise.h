// What the element-wise ops of two inputs share: one TensorIterator that lays out any strides without a copy, the CPU
// loop over it, and the way from it to a CUDA launch.
#pragma once
#include <ATen/Dispatch.h>
#include <ATen/TensorIterator.h>

#include "ops/common/check.h"

namespace dpa {

/// Checks that `b` matches `a`, which is floating.
void check_pair(const char* op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b);

/// The result of an element-wise op keeps the strides of `a` where they are dense, as PyTorch's own do.
at::TensorIterator binary_iterator(const Tensor& out, const Tensor& a, const Tensor& b);

/// out[i] = f(a[i], b[i]), with arithmetic in float32 for 16-bit types.
template <class F>
void binary_cpu(at::TensorIterator& iterator, const F& f) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, iterator.common_dtype(), "dpa::binary", [&] {
    using A = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    iterator.for_each([&](char** data, const int64_t* strides, int64_t n) {
      constexpr int64_t kSize = sizeof(scalar_t);
      const auto loop = [&](int64_t out_step, int64_t a_step, int64_t b_step) {
        char *out = data[0], *a = data[1], *b = data[2];
        for (int64_t i = 0; i < n; ++i)
          *reinterpret_cast<scalar_t*>(out + i * out_step) =
              static_cast<scalar_t>(f(static_cast<A>(*reinterpret_cast<const scalar_t*>(a + i * a_step)),
                                      static_cast<A>(*reinterpret_cast<const scalar_t*>(b + i * b_step))));
      };
      // With the steps spelled out, the compiler turns the contiguous case into vector code.
      if (strides[0] == kSize && strides[1] == kSize && strides[2] == kSize) return loop(kSize, kSize, kSize);
      loop(strides[0], strides[1], strides[2]);
    });
  });
}

}  // namespace dpa
