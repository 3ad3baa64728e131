// The bounds of a window of parallel sampling. Pure host code.
#pragma once
#include <cstdint>

namespace dpa::kernels {

/// The most timesteps of a window: sums of so many rows fit the shared memory of every GPU.
constexpr int64_t kLargestWindow = 128;

}  // namespace dpa::kernels
