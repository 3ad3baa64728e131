// Float32 numbers as pairs of float16 numbers: math/two_halves.h.
#pragma once
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/math/two_halves.h"

namespace dpa::kernels {

// Two numbers times `scale`: their high halves in one word, the first in the lower half, their low halves in another.
__device__ __forceinline__ void split_pair(float x, float y, float scale, uint32_t& high, uint32_t& low) {
  x *= scale, y *= scale;
  high = pack_pair<__half>(x, y);
  const float2 h = unpack_pair<__half>(high);
  low = pack_pair<__half>((x - h.x) * math::kLowScale, (y - h.y) * math::kLowScale);
}

}  // namespace dpa::kernels
