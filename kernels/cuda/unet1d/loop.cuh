// What the kernels that run a whole loop share.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/plans/unet1d/loop.h"

namespace dpa::kernels::unet1d {

// An injected test delay, where a warp's timing must not change any result: with DPA_TEST_DELAYS, warps sleep at
// random.
__device__ __forceinline__ void inject_test_delay() {
#ifdef DPA_TEST_DELAYS
  const uint32_t now = static_cast<uint32_t>(clock64());
  const uint32_t dice = (now ^ (blockIdx.x * 977 + threadIdx.x / 32) * 2654435761u) * 2246822519u;
  if (__shfl_sync(~0u, dice >> 16, 0) % 97 == 0) __nanosleep(20000);
#endif
}

// Value i of the sample, or what is known of it (inpainting).
template <class Index>
__device__ __forceinline__ float with_condition(const LoopArguments& a, float x, Index i) {
  return a.condition_mask && a.condition_mask[i] ? a.condition_data[i] : x;
}

// Mish where what follows has 16 bits, without the care for values near the ends of the range, which do not come here.
__device__ __forceinline__ float quick_mish(float x) {
  constexpr float kLog2E = 1.44269504f;
  const float e = ptx::exp2_approx(fminf(x, 20.0f) * kLog2E);
  const float n = e * (e + 2.0f);
  return x * (n * ptx::reciprocal_approx(n + 2.0f));
}

}  // namespace dpa::kernels::unet1d
