// out[n, p, q, o] = sum over c, r, s of image[n, c, 2 p + r - padding, 2 q + s - padding] weight[o, c, r, s]
//
// A GEMM by mma.sync in tf32: rows are pixels of the output, columns its channels, K is (c, r, s) (few_channels.cuh).
//
// grid   blocks take tiles of 16 x 16 pixels in turn; y: 64 channels
// block  loads the weights once, in the MMA's order; four warps load the next tile's part of the image
// warp   of the other eight: two rows of the tile, all 64 channels
// lane   of a pixel and two accumulators, four neighbouring channels: which of the weights' columns is which channel is
//        chosen so
#include "kernels/cuda/conv2d/few_channels.cuh"

namespace dpa::kernels::conv2d {
namespace {

constexpr int kReach = 128;  // more than a tile goes beyond an edge, of either kernel
constexpr int kSide = 16, kTilesOfLane = kFewColumns / 8;
constexpr int kStepWords = kFewColumns * kFewTaps;  // of the weights
using Tile = FewTile<kSide, kSide>;
using Image = FewImage<kSide, kSide>;

/// The channel, among 64, of column `column` of the `tile`-th eight.
__device__ __forceinline__ int channel_of(int tile, int column) {
  return tile / 2 * 16 + column / 2 * 4 + tile % 2 * 2 + column % 2;
}

/// Words (step, two tiles, lane, four): taps lane % 4 and that + 4 of column lane / 4 of either tile.
template <class T>
__device__ __forceinline__ void load_weights(const FewChannels& conv, const T* weight, int first, int steps,
                                             uint32_t* to) {
  for (int i = threadIdx.x; i < steps * kStepWords; i += kFewThreads) {
    const int step = i / kStepWords, lane = i / 4 % 32, tile = i / 128 % (kTilesOfLane / 2) * 2 + i / 2 % 2;
    const int tap = lane % 4 + i % 2 * 4, channel = first + channel_of(tile, lane / 4);
    const int c = step / conv.taps, r = step - c * conv.taps;
    const int64_t* const strides = conv.weight_strides;
    to[i] = tap < conv.taps && channel < conv.out_channels
                ? ptx::to_tf32(widen(weight[channel * strides[0] + c * strides[1] + r * strides[2] + tap * strides[3]]))
                : 0;
  }
}

using Sums = float[2][kTilesOfLane][4];

/// Two rows of 16 pixels times 64 columns. `pixels`: of the first row under a step's first tap.
__device__ __forceinline__ void multiply_step(uint32_t pixels, uint32_t weights, bool has_more, Sums& sums) {
  uint4 a[2], b[kTilesOfLane / 2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const uint32_t from = pixels + row * 2 * Image::kColumns * 4;
    a[row] =
        make_uint4(ptx::load_shared_word(from), ptx::load_shared_word(from + 64),
                   has_more ? ptx::load_shared_word(from + 16) : 0, has_more ? ptx::load_shared_word(from + 80) : 0);
  }
#pragma unroll
  for (int j = 0; j < kTilesOfLane / 2; ++j) b[j] = ptx::load_shared_16(weights + j * 512);
#pragma unroll
  for (int j = 0; j < kTilesOfLane / 2; ++j)
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      ptx::mma<float>(sums[row][2 * j], a[row], b[j].x, b[j].y);
      ptx::mma<float>(sums[row][2 * j + 1], a[row], b[j].z, b[j].w);
    }
}

template <class T>
__device__ __forceinline__ void store_pixel(T* to, const float (&x)[4]) {
  if constexpr (sizeof(T) == 4)
    *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
  else
    *reinterpret_cast<uint2*>(to) = {pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3])};
}

template <class T>
__global__ void __launch_bounds__(kFewThreads + kFewLoaders, 1)
    fprop(const __grid_constant__ FewChannels conv, int tiles, const T* image, const T* weight, T* out) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) uint32_t words[];
  const int taps = conv.taps, steps = static_cast<int>(conv.channels) * taps, first = blockIdx.y * kFewColumns;
  const Image shape(conv);
  uint32_t* const pixels = words + steps * kStepWords;  // of two tiles
  if (threadIdx.x >= kFewThreads) {                     // each while the one before is worked on
    const FewLoads<T, kSide, kSide> loads(conv);
    int buffer = 0;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x, buffer ^= 1) {
      loads.load(conv, image, Tile(conv, index), pixels + buffer * shape.words);
      __syncthreads();  // the tile is there; the one before is done with
    }
    return;
  }
  load_weights(conv, weight, first, steps, words);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t weights = ptx::shared_address(words) + lane * 16;
  // Of the first row's pixel lane / 4, tap lane % 4.
  const uint32_t lanes = ptx::shared_address(pixels) + (4 * warp * Image::kColumns + lane / 4 * 2 + lane % 4) * 4;
  const bool has_more = lane % 4 + 4 < taps;  // taps beyond the filter may be any number
  int buffer = 0;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x, buffer ^= 1) {
    const Tile at(conv, index);
    __syncthreads();  // the first one is for the weights, too
    Sums sums = {};
    uint32_t b_at = weights;
    for (int c = 0; c < conv.channels; ++c) {
      uint32_t a_at = lanes + (buffer * shape.words + c * shape.plane) * 4;
#pragma unroll 2
      for (int r = 0; r < taps; ++r, a_at += Image::kColumns * 4, b_at += kStepWords * 4)
        multiply_step(a_at, b_at, has_more, sums);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int p = at.row + 2 * warp + row, q = at.column + lane / 4 + half * 8;
        if (p >= conv.out_height || q >= conv.out_width) continue;
        T* const to = out + ((int64_t{at.sample} * conv.out_height + p) * conv.out_width + q) * conv.out_channels;
#pragma unroll
        for (int j = 0; j < kTilesOfLane / 2; ++j) {
          const int channel = first + channel_of(2 * j, lane % 4 * 2);
          const auto &low = sums[row][2 * j], &high = sums[row][2 * j + 1];
          const float x[4] = {low[2 * half], low[2 * half + 1], high[2 * half], high[2 * half + 1]};
          if (channel < conv.out_channels) store_pixel(to + channel, x);
        }
      }
  }
#endif
}

int shared_bytes(const FewChannels& conv) {
  return static_cast<int>(conv.channels * conv.taps * kStepWords + 2 * Image(conv).words) * 4;
}

}  // namespace

bool takes_few_channels(const FewChannels& conv) {
  const int64_t pixels = conv.batch * conv.out_height * conv.out_width;
  int64_t reach = 0;  // in elements, of offsets within an image and the rows and columns beside it
  for (const int64_t n : {conv.image_strides[1] * conv.channels, conv.image_strides[2] * (conv.height + kReach),
                          conv.image_strides[3] * (conv.width + kReach)})
    reach += n;
  return conv.channels >= 1 && conv.channels <= 4 && conv.taps >= 5 && conv.taps <= kFewTaps &&
         conv.channels * conv.taps <= kFewSteps && conv.padding < conv.taps && conv.out_channels % 8 == 0 &&
         conv.out_channels > 0 && conv.out_channels <= kFewColumns * 64 && pixels > 0 && pixels < INT32_MAX / 2 &&
         pixels * conv.out_channels < INT32_MAX && reach < INT32_MAX / 2 &&
         device_attribute(cudaDevAttrComputeCapabilityMajor) >= 8 &&
         shared_bytes(conv) <= device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

cudaError_t few_channels_fprop(const FewChannels& conv, const void* image, const void* weight, void* out,
                               cudaStream_t stream) {
  return dispatch_to_32_bits(conv.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int tiles = static_cast<int>(Tile::count(conv));
    return LaunchConfig(few_blocks<Tile>(conv), kFewThreads + kFewLoaders, stream, shared_bytes(conv))
        .launch(fprop<T>, conv, tiles, static_cast<const T*>(image), static_cast<const T*>(weight),
                static_cast<T*>(out));
  });
}

}  // namespace dpa::kernels::conv2d
