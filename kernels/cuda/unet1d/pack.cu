// Packing: the original tensors into one buffer, once per set of weights.
//
//   copy_kernel    dst[(i n1 + j) n2 + l] = src[offset + i s0 + j s1 + l s2]; a thread an element, striding over the
//                  grid; of biases in front of a norm less the mean of their group
//   tiles_kernel   a convolution's weights as 16 x 16 tiles in the order that matrix instructions hold them:
//                  (slice_out, slice_in, tap, channel step, row tile, element); a thread an element of the destination.
//                  Rows and channels that only fill a tile up are zero. Of float32 the high halves come first, then
//                  the low ones (math/two_halves.h).
//   scales_kernel  scale[o] = max over i and taps of |w[o, i, tap]| / 448, the largest e4m3 (1 where all are zero); a
//                  block an output channel
#include <algorithm>

#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/unet1d/tile.cuh"
#include "kernels/cuda/unet1d/unet1d.h"

namespace dpa::kernels::unet1d {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 4096;
enum Special { kZeros = -1, kIdentity = -2 };

struct Tiles {
  Tiling tiling;
  int taps, slices_out, slices_in, channels_in, channels_out, tap_first, tap_step;
  int64_t stride_out, stride_in, stride_tap;
  bool identity;
};

// Channel i of a bias as it differs from its group.
template <class Source>
__device__ float beside_group(const Source* source, const CopyItem& item, int i) {
  const int width = item.n[0] / item.groups, first = i / width * width;
  if (i - first >= item.counted) return static_cast<float>(widen(source[i]));
  float sum = 0.0f;
  for (int c = first; c < first + item.counted; c++) sum += static_cast<float>(widen(source[c]));
  return static_cast<float>(widen(source[i])) - sum / static_cast<float>(item.counted);
}

template <class Source, class Target>
__global__ void copy_kernel(const Source* source, Target* target, CopyItem item) {
  const int64_t count = static_cast<int64_t>(item.n[0]) * item.n[1] * item.n[2];
  for (int64_t e = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; e < count;
       e += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t l = e % item.n[2], j = e / item.n[2] % item.n[1], i = e / item.n[2] / item.n[1];
    float value = item.weight == kIdentity && i == j ? 1.0f : 0.0f;
    if (item.groups > 0)
      value = beside_group(source, item, static_cast<int>(e));
    else if (item.weight >= 0)
      value =
          static_cast<float>(widen(source[item.offset + i * item.stride[0] + j * item.stride[1] + l * item.stride[2]]));
    target[e] = narrow<Target>(value);
  }
}

template <class Target>
__device__ __forceinline__ Target stored(float x) {
  if constexpr (sizeof(Target) == 1)
    return Target(x);
  else
    return narrow<Target>(x);
}

template <class Source>
__global__ void scales_kernel(const Source* source, float* scales, TileItem item, int channels_in) {
  __shared__ float largest[kThreads];
  float most = item.weight < 0 ? 1.0f : 0.0f;
  for (int e = threadIdx.x; item.weight >= 0 && e < channels_in * item.tap_count; e += kThreads) {
    const int in = e / item.tap_count, tap = e % item.tap_count;
    most = fmaxf(most, fabsf(static_cast<float>(
                           widen(source[blockIdx.x * item.stride_out + in * item.stride_in + tap * item.stride_tap]))));
  }
  largest[threadIdx.x] = most;
  for (int n = kThreads / 2; n; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + n]);
  }
  if (threadIdx.x == 0) scales[blockIdx.x] = largest[0] > 0.0f ? largest[0] / 448.0f : 1.0f;
}

template <class Source, class Target>
__global__ void tiles_kernel(const Source* source, Target* target, const float* scales,
                             const __grid_constant__ Tiles t) {
  const int per_tap = t.tiling.in_steps + t.tiling.skip_steps;
  const int64_t slice = static_cast<int64_t>(t.taps) * per_tap * t.tiling.row_tiles * 256;
  const int64_t count = slice * t.slices_out * t.slices_in;
  for (int64_t e = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; e < count;
       e += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int in_tile = static_cast<int>(e % 256);
    const int64_t tile = e % slice / 256;
    const int step = static_cast<int>(tile / t.tiling.row_tiles), tap = step / per_tap,
              part = static_cast<int>(e / slice);
    const int lane = in_tile / 8, j = in_tile % 8, k = lane % 4 * 2 + (j & 1) + (j >> 2) * 8;
    const int row = lane / 4 + (j >> 1 & 1) * 8 + static_cast<int>(tile % t.tiling.row_tiles) * 16;
    const int out = part / t.slices_in * t.tiling.rows + row, slice_in = part % t.slices_in;
    int channel = step % per_tap * 16 + k, in = -1;
    if (channel < t.tiling.in_steps * 16) {
      if (channel < t.tiling.in) in = slice_in * t.tiling.in + channel;
    } else {
      channel -= t.tiling.in_steps * 16;
      if (channel < t.tiling.skip) in = t.channels_in + slice_in * t.tiling.skip + channel;
    }
    float value = 0.0f;
    if (row < t.tiling.rows && in >= 0) {
      if (t.identity)
        value = in == out ? 1.0f : 0.0f;
      else
        value = static_cast<float>(
            widen(source[out * t.stride_out + in * t.stride_in + (t.tap_first + tap * t.tap_step) * t.stride_tap]));
    }
    if constexpr (sizeof(Target) == 4) {
      uint32_t high, low;
      split_pair(value, 0.0f, math::kWeightScale, high, low);
      uint16_t* to = reinterpret_cast<uint16_t*>(target + (e - in_tile)) + in_tile;
      to[0] = static_cast<uint16_t>(high), to[256] = static_cast<uint16_t>(low);
    } else {
      target[e] = stored<Target>(scales && row < t.tiling.rows ? value / scales[out] : value);
    }
  }
}

template <class Source, class Dense, class Target>
cudaError_t pack_as(const Plan& plan, const void* const* weights, void* packed, cudaStream_t stream) {
  auto blocks = [](int64_t n) {
    return static_cast<unsigned>(std::min<int64_t>((n + kThreads - 1) / kThreads, kMaxBlocks));
  };
  auto* bytes = static_cast<uint8_t*>(packed);
  for (const CopyItem& item : plan.copies) {
    const auto* source = item.weight >= 0 ? static_cast<const Source*>(weights[item.weight]) : nullptr;
    const unsigned grid = blocks(static_cast<int64_t>(item.n[0]) * item.n[1] * item.n[2]);
    cudaError_t error = item.to_float ? launch(copy_kernel<Source, float>, grid, kThreads, stream, source,
                                               reinterpret_cast<float*>(bytes + item.destination), item)
                                      : launch(copy_kernel<Source, Dense>, grid, kThreads, stream, source,
                                               reinterpret_cast<Dense*>(bytes + item.destination), item);
    if (error != cudaSuccess) return error;
  }
  for (const TileItem& item : plan.tiles) {
    const Conv& conv = plan.convs[item.conv];
    const Segment& segment = conv.segments[item.segment];
    const Tiles t = {tiling(plan, conv), segment.taps,      plan.slices_out, conv.slices_in,
                     conv.channels_in,   conv.channels_out, item.tap_first,  item.tap_step,
                     item.stride_out,    item.stride_in,    item.stride_tap, item.weight < 0};
    const int64_t count =
        static_cast<int64_t>(t.taps) * t.tiling.steps_per_tap() * t.tiling.row_tiles * 256 * t.slices_out * t.slices_in;
    const auto* source = item.weight >= 0 ? static_cast<const Source*>(weights[item.weight]) : nullptr;
    float* scales = conv.scale < 0
                        ? nullptr
                        : reinterpret_cast<float*>(bytes + plan.floats) + conv.scale + item.segment * conv.channels_out;
    if (scales) {
      const cudaError_t error = launch(scales_kernel<Source>, conv.channels_out, kThreads, stream, source, scales, item,
                                       conv.channels_in + conv.channels_skip);
      if (error != cudaSuccess) return error;
    }
    const cudaError_t error = launch(tiles_kernel<Source, Target>, blocks(count), kThreads, stream, source,
                                     reinterpret_cast<Target*>(bytes + segment.weights), scales, t);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t pack(const Plan& plan, const void* const* weights, DType source, void* packed, cudaStream_t stream) {
  if (!plan.error.empty()) return cudaErrorInvalidValue;
  return dispatch_to_32_bits(source, [&](auto from) {
    return dispatch_weights(plan.dtype, [&](auto to) {
      using Target = typename decltype(to)::type;
      using Dense = std::conditional_t<sizeof(Target) == 1, __half, Target>;
      return pack_as<typename decltype(from)::type, Dense, Target>(plan, weights, packed, stream);
    });
  });
}

}  // namespace dpa::kernels::unet1d
