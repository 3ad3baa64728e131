// Element types on the line between ops/ and kernels/: pointers are untyped, `DType` says what they point to.
#pragma once

namespace dpa::kernels {

/// kFloat8E4M3 is for packed weights alone (kernels/unet1d): no arithmetic is done in it.
enum class DType { kFloat64, kFloat32, kFloat16, kBFloat16, kFloat8E4M3 };

}  // namespace dpa::kernels
