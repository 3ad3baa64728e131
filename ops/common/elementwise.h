// What the element-wise ops of two inputs share: one TensorIterator that lays out any strides without a copy, the CPU
// loop over it, and the way from it to a CUDA launch.
#pragma once
#include <ATen/Dispatch.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_like.h>

#include "ops/common/check.h"
#include "ops/common/convert.h"
#include "ops/common/vectorize.h"

namespace dpa {

/// Checks that `b` matches `a`, which is floating.
void check_pair(const char* op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b);

/// The result of an element-wise op keeps the strides of `a` where they are dense, as PyTorch's own do.
at::TensorIterator binary_iterator(const Tensor& out, const Tensor& a, const Tensor& b);

/// out[i] = f(a[i], b[i]) for `count` neighbours, with arithmetic in float32 for 16-bit types.
template <class T, class F>
DPA_VECTORIZE void binary_row(T* out, const T* a, const T* b, int64_t count, const F& f) {
  for (int64_t i = 0; i < count; ++i) narrow(f(widen(a[i]), widen(b[i])), out[i]);
}

/// The same for elements at any distance in bytes.
template <class T, class F>
void binary_strided(char** data, const int64_t* strides, int64_t count, const F& f) {
  for (int64_t i = 0; i < count; ++i) {
    const auto at = [&](int operand) { return reinterpret_cast<T*>(data[operand] + i * strides[operand]); };
    narrow(f(widen(*at(1)), widen(*at(2))), *at(0));
  }
}

template <class F>
void binary_cpu(at::TensorIterator& iterator, const F& f) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, iterator.common_dtype(), "dpa::binary", [&] {
    iterator.for_each([&](char** data, const int64_t* strides, int64_t n) {
      constexpr int64_t kSize = sizeof(scalar_t);
      if (strides[0] == kSize && strides[1] == kSize && strides[2] == kSize)
        binary_row(reinterpret_cast<scalar_t*>(data[0]), reinterpret_cast<const scalar_t*>(data[1]),
                   reinterpret_cast<const scalar_t*>(data[2]), n, f);
      else
        binary_strided<scalar_t>(data, strides, n, f);
    });
  });
}

/// f(a, b) in a new tensor. To lay out small contiguous tensors would cost more than to compute them.
template <class F>
Tensor binary_cpu(const Tensor& a, const Tensor& b, const F& f) {
  if (a.numel() <= at::internal::GRAIN_SIZE && a.is_contiguous() && b.is_contiguous()) {
    const Tensor out(at::detail::empty_cpu(a.sizes(), a.scalar_type()));
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, a.scalar_type(), "dpa::binary", [&] {
      binary_row(out.mutable_data_ptr<scalar_t>(), a.const_data_ptr<scalar_t>(), b.const_data_ptr<scalar_t>(),
                 a.numel(), f);
    });
    return out;
  }
  auto out = at::empty_like(a);
  auto iterator = binary_iterator(out, a, b);
  binary_cpu(iterator, f);
  return out;
}

}  // namespace dpa
