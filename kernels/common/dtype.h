// Element types on the line between ops/ and kernels/: pointers are untyped, `DType` says what they point to.
#pragma once

namespace dpa::kernels {

enum class DType { kFloat64, kFloat32, kFloat16, kBFloat16 };

}  // namespace dpa::kernels
