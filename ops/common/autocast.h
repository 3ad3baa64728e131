// What autocast kernels share: they cast their tensors and call the op again with autocast switched off.
#pragma once
#include <ATen/autocast_mode.h>

#include "ops/common/check.h"

namespace dpa {

/// Casts eligible tensors (on the device, floating, not float64) to `type`; autocast is off while it lives.
class Autocast {
 public:
  Autocast(at::DeviceType device, at::ScalarType type)
      : no_autocast_(at::autocast::get_autocast_dispatch_key_from_device_type(device)), device_(device), type_(type) {}
  /// The dtype that the user's autocast region asks for.
  explicit Autocast(at::DeviceType device)
      : Autocast(device, at::autocast::get_lower_precision_fp_from_device_type(device)) {}

  Tensor operator()(const Tensor& tensor) const { return at::autocast::cached_cast(type_, tensor, device_); }
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

 private:
  c10::impl::ExcludeDispatchKeyGuard no_autocast_;
  at::DeviceType device_;
  at::ScalarType type_;
};

}  // namespace dpa
