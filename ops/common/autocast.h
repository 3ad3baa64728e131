// What an op's autocast is: its tensors cast, then the op again with autocast switched off.
#pragma once
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops/common/check.h"
#include "ops/common/op.h"

namespace dpa {

/// Casts eligible tensors (on the device, floating, not float64) to `type`; leaves everything else as it is.
struct Autocast {
  at::DeviceType device;
  at::ScalarType type;  // at first the dtype of the user's autocast region

  template <class T>
  const T& operator()(const T& other) const {
    return other;
  }
  Tensor operator()(const Tensor& tensor) const { return at::autocast::cached_cast(type, tensor, device); }
  OptionalTensor operator()(const OptionalTensor& tensor) const {
    return tensor.has_value() ? OptionalTensor((*this)(*tensor)) : std::nullopt;
  }

  /// A parameter of an op that takes it in float32 beside 16-bit activations stays as it is: no copy, and a gradient in
  /// its own precision.
  Tensor parameter(const Tensor& tensor, const Tensor& input) const {
    const bool keeps = tensor.scalar_type() == at::kFloat && accumulate_type(input.scalar_type()) == at::kFloat;
    return keeps ? tensor : (*this)(tensor);
  }
  OptionalTensor parameter(const OptionalTensor& tensor, const Tensor& input) const {
    return tensor.has_value() ? OptionalTensor(parameter(*tensor, input)) : std::nullopt;
  }
};

// The three ways to cast all tensors of an op alike.
struct InRegionType {
  template <class Op, class... Args>
  static auto call(const Op& op, const Autocast& cast, const Args&... args) {
    return op(cast(args)...);
  }
};
struct InFloat {
  template <class Op, class... Args>
  static auto call(const Op& op, Autocast cast, const Args&... args) {
    cast.type = at::kFloat;
    return op(cast(args)...);
  }
};
/// As PyTorch's own element-wise ops do.
struct InWidestType {
  template <class Op, class First, class... Args>
  static auto call(const Op& op, Autocast cast, const First& first, const Args&... args) {
    cast.type = first.scalar_type();
    const auto widen = [&](const auto& arg) {
      if constexpr (std::is_same_v<std::decay_t<decltype(arg)>, Tensor>)
        cast.type = at::promoteTypes(cast.type, arg.scalar_type());
    };
    (widen(args), ...);
    return op(cast(first), cast(args)...);
  }
};
/// An op whose tensors are not all alike: `function` takes the cast, then the arguments.
template <auto function>
struct With {
  template <class Op, class... Args>
  static auto call(const Op&, const Autocast& cast, const Args&... args) {
    return function(cast, args...);
  }
};

template <class Op, class How, at::DeviceType Device>
struct AutocastKernel;

template <OpName Name, class R, class... Args, class How, at::DeviceType Device>
struct AutocastKernel<const Op<Name, R(Args...)>, How, Device> {
  static R call(Args... args) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        at::autocast::get_autocast_dispatch_key_from_device_type(Device));
    const Autocast cast{Device, at::autocast::get_lower_precision_fp_from_device_type(Device)};
    return How::call(Op<Name, R(Args...)>(), cast, args...);
  }
};

}  // namespace dpa

/// Registers the autocast of `op`, in one of the ways above.
#define DPA_AUTOCAST(op, ...)                                                                      \
  TORCH_LIBRARY_IMPL(dpa, AutocastCPU, m) {                                                        \
    m.impl(op.name(), &dpa::AutocastKernel<decltype(dpa::op), dpa::__VA_ARGS__, at::kCPU>::call);  \
  }                                                                                                \
  TORCH_LIBRARY_IMPL(dpa, AutocastCUDA, m) {                                                       \
    m.impl(op.name(), &dpa::AutocastKernel<decltype(dpa::op), dpa::__VA_ARGS__, at::kCUDA>::call); \
  }
