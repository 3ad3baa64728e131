// gradient[o, c, r, s] = sum over n, p, q of image[n, c, 2 p + r - padding, 2 q + s - padding] grad[n, p, q, o]
//
// A GEMM by mma.sync in tf32: rows are (c, r, s), two steps (few_channels.cuh) a tile of 16, columns output channels, and
// K is pixels: eight of a row at a time.
//
// grid   blocks take tiles of pixels in turn, and leave a sum each; y: 64 channels. A second kernel adds the sums up
// block  loads the next tile while it works on one
// warp   every fourth tile of rows, all 64 channels, every other eight pixels
// lane   of a tile of 8 columns one: which channel it is, is chosen so that a lane's of several tiles are neighbours
#include "kernels/cuda/conv2d/few_channels.cuh"

namespace dpa::kernels::conv2d {
namespace {

constexpr int kWide = 32, kHigh = 4, kPixels = kHigh * kWide;
constexpr int kGroups = 4, kHalves = kFewThreads / 32 / kGroups;  // of warps: of rows, of pixels
constexpr int kTilesOfLane = kFewColumns / 8, kRowWords = 16 * kFewColumns;
constexpr int kParts = kFewThreads / kFewColumns;
using Tile = FewTile<kHigh, kWide>;
using Image = FewImage<kHigh, kWide>;

/// Of a pixel's 64 gradients in shared memory: no bank conflicts among four pixels of four channels each.
template <class T>
constexpr int kPitch = sizeof(T) == 4 ? 72 : 80;

template <class T>
constexpr uint32_t kPixelBytes = kPitch<T> * sizeof(T);
template <class T>
constexpr uint32_t kGradBytes = kPixels * kPixelBytes<T>;  // of a tile

template <class T>
struct Buffers {
  int image, bytes;  // words of an image; of both
  __host__ __device__ explicit Buffers(const Image& shape)
      : image((shape.words + 3) / 4 * 4), bytes(2 * (image * 4 + static_cast<int>(kGradBytes<T>))) {}
};

/// A thread has the same piece of every few pixels.
template <class T>
__device__ __forceinline__ void load_gradients(const FewChannels& conv, const T* grad, const Tile& at, int first,
                                               int thread, uint32_t to) {
  constexpr int kPieces = kFewColumns * sizeof(T) / 16, kElements = 16 / sizeof(T), kStep = kFewLoaders / kPieces;
  static_assert(kWide % kStep == 0, "the pixels of a row, in turn");
  const int width = static_cast<int>(conv.out_width), channels = static_cast<int>(conv.out_channels);
  const int pixel = thread / kPieces, channel = thread % kPieces * kElements;
  const int columns = first + channel < channels ? width - at.column - pixel : 0;  // that there are
  const int rows = static_cast<int>(conv.out_height) - at.row;
  const T* const from =
      grad +
      ((at.sample * static_cast<int>(conv.out_height) + at.row) * width + at.column + pixel) * int64_t{channels} +
      first + channel;
  to += (pixel * kPitch<T> + channel) * static_cast<int>(sizeof(T));
#pragma unroll
  for (int row = 0; row < kHigh; ++row)
#pragma unroll
    for (int q = 0; q < kWide; q += kStep) {
      const bool there = row < rows && q < columns;
      ptx::copy_async_16_if(to + (row * kWide + q) * kPixelBytes<T>, there ? from + (row * width + q) * channels : grad,
                            there);
    }
}

/// Channels 4 (lane / 4) to that + 3 of either half of the 64, in the MMA's words.
template <class T>
__device__ __forceinline__ void load_columns(uint32_t from, uint32_t (&to)[kTilesOfLane]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (sizeof(T) == 4) {
      const float4 x = ptx::load_shared(from + half * 128);
      to[4 * half] = ptx::to_tf32(x.x), to[4 * half + 1] = ptx::to_tf32(x.y);
      to[4 * half + 2] = ptx::to_tf32(x.z), to[4 * half + 3] = ptx::to_tf32(x.w);
    } else {
      const uint2 x = ptx::load_shared_8(from + half * 64);
      const float2 low = unpack_pair<T>(x.x), high = unpack_pair<T>(x.y);
      to[4 * half] = __float_as_uint(low.x), to[4 * half + 1] = __float_as_uint(low.y);
      to[4 * half + 2] = __float_as_uint(high.x), to[4 * half + 3] = __float_as_uint(high.y);
    }
  }
}

template <int kTiles>
using Sums = float[kTiles][kTilesOfLane][4];

/// Eight pixels of a row. kWhole: all are there; else `left` of them, and the others are zeros in both operands,
/// whatever lies there in the image.
template <class T, int kTiles, bool kWhole>
__device__ __forceinline__ void multiply_pixels(const uint32_t (&a_at)[kTiles][2], uint32_t a_from, uint32_t b_from,
                                                int left, Sums<kTiles>& sums) {
  const int pixel = threadIdx.x % 4;
  const uint32_t keep[2] = {kWhole || pixel < left ? ~0u : 0u, kWhole || pixel + 4 < left ? ~0u : 0u};
  uint32_t b[2][kTilesOfLane];
  load_columns<T>(b_from, b[0]);
  load_columns<T>(b_from + 4 * kPixelBytes<T>, b[1]);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const uint32_t low = a_from + a_at[i][0], high = a_from + a_at[i][1];
    const uint4 a = {ptx::load_shared_word(low) & keep[0], ptx::load_shared_word(high) & keep[0],
                     ptx::load_shared_word(low + 32) & keep[1], ptx::load_shared_word(high + 32) & keep[1]};
#pragma unroll
    for (int j = 0; j < kTilesOfLane; ++j) ptx::mma<float>(sums[i][j], a, b[0][j], b[1][j]);
  }
}

/// Loads this block's tiles, one after the other, each while the one before is worked on.
template <class T>
__device__ __forceinline__ void load_tiles(const FewChannels& conv, int tiles, const T* image, const T* grad, int first,
                                           uint32_t* words) {
  const Buffers<T> buffers{Image(conv)};
  const uint32_t grads = ptx::shared_address(words + 2 * buffers.image);
  const FewLoads<T, kHigh, kWide> loads(conv);
  int buffer = 0;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x, buffer ^= 1) {
    const Tile at(conv, index);
    load_gradients(conv, grad, at, first, threadIdx.x - kFewThreads, grads + buffer * kGradBytes<T>);
    loads.load(conv, image, at, words + buffer * buffers.image);
    ptx::copy_async_wait();
    __syncthreads();  // the tile is there; the one before is done with
  }
}

/// kTiles: of rows, for a warp. `partials`: (blocks, steps, 8, 64).
template <class T, int kTiles>
__global__ void __launch_bounds__(kFewThreads + kFewLoaders, 1)
    wgrad(const __grid_constant__ FewChannels conv, int tiles, const T* image, const T* grad, float* partials) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) uint32_t words[];
  const Image shape(conv);
  const Buffers<T> buffers(shape);
  const int steps = static_cast<int>(conv.channels) * conv.taps, first = blockIdx.y * kFewColumns;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp % kGroups, half = warp / kGroups;
  float* const shared = reinterpret_cast<float*>(words);
  if (threadIdx.x >= kFewThreads) {
    load_tiles(conv, tiles, image, grad, first, words);
  } else {
    // Of this warp's tiles the words of tap lane / 4 at pixel lane % 4: of the first and of the second step.
    uint32_t a_at[kTiles][2];
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int step = min(2 * (group + i * kGroups) + k, steps - 1), c = step / conv.taps;
        a_at[i][k] = (c * shape.plane + (step - c * conv.taps) * Image::kColumns + lane % 4 * 2 + lane / 4) * 4;
      }
    const uint32_t images = ptx::shared_address(words) + half * 64;
    const uint32_t grads = ptx::shared_address(words + 2 * buffers.image) + lane / 4 * 4 * sizeof(T) +
                           (half * 8 + lane % 4) * kPixelBytes<T>;
    Sums<kTiles> sums = {};
    int buffer = 0;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x, buffer ^= 1) {
      const Tile at(conv, index);
      uint32_t a_from = images + buffer * buffers.image * 4, b_from = grads + buffer * kGradBytes<T>;
      const int rows = min(kHigh, static_cast<int>(conv.out_height) - at.row);
      const int columns = min(kWide, static_cast<int>(conv.out_width) - at.column) - half * 8;
      constexpr int kStep = kHalves * 8;
      __syncthreads();
#pragma unroll 1
      for (int row = 0; row < rows; ++row, a_from += 2 * Image::kColumns * 4, b_from += kWide * kPixelBytes<T>) {
        if (columns >= kWide - kStep + 8) {
#pragma unroll
          for (int q = 0; q < kWide; q += kStep)
            multiply_pixels<T, kTiles, true>(a_at, a_from + q * 8, b_from + q * kPixelBytes<T>, 8, sums);
        } else {
#pragma unroll 1
          for (int q = 0; q < columns; q += kStep)
            multiply_pixels<T, kTiles, false>(a_at, a_from + q * 8, b_from + q * kPixelBytes<T>, columns - q, sums);
        }
      }
    }
    // The halves of the pixels, through shared memory; then rows of 64 channels.
    ptx::sync_threads(1, kFewThreads);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      if (half == h) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
          for (int j = 0; j < kTilesOfLane; ++j)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const int row = (group + i * kGroups) * 16 + lane / 4 + k / 2 * 8;
              const int channel = j / 4 * 32 + (lane % 4 * 2 + k % 2) * 4 + j % 4;
              float& to = shared[row * kFewColumns + channel];
              to = h == 0 ? sums[i][j][k] : to + sums[i][j][k];
            }
      }
      ptx::sync_threads(1, kFewThreads);
    }
    float* const mine = partials + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * steps * kFewTaps * kFewColumns;
    for (int i = threadIdx.x; i < steps * kFewTaps * kFewColumns / 4; i += kFewThreads)
      reinterpret_cast<float4*>(mine)[i] = reinterpret_cast<const float4*>(shared)[i];
  }
#endif
}

/// A block: a row of the sums, (c, r, s); a thread: a channel, and every kParts-th block's.
template <class T>
__global__ void __launch_bounds__(kFewThreads)
    add_blocks(const __grid_constant__ FewChannels conv, int blocks, const float* partials, T* gradient) {
  __shared__ float parts[kParts][kFewColumns];
  const int column = threadIdx.x % kFewColumns, part = threadIdx.x / kFewColumns;
  const int tap = blockIdx.x % conv.taps, step = blockIdx.x / conv.taps;
  const int64_t steps = conv.channels * conv.taps, all = steps * kFewTaps * kFewColumns;
  grid_dependency_sync();
  const float* const from =
      partials + int64_t{blockIdx.y} * blocks * all + (step * kFewTaps + tap) * kFewColumns + column;
  float sum = 0;
#pragma unroll 8
  for (int block = part; block < blocks; block += kParts) sum += from[block * all];
  parts[part][column] = sum;
  __syncthreads();
  const int64_t channel = blockIdx.y * kFewColumns + column;
  if (part != 0 || channel >= conv.out_channels) return;
  sum = 0;
#pragma unroll
  for (const auto& each : parts) sum += each[column];
  const int c = step / conv.taps, r = step - c * conv.taps;
  const int64_t* const strides = conv.weight_strides;
  gradient[channel * strides[0] + c * strides[1] + r * strides[2] + tap * strides[3]] = narrow<T>(sum);
}

}  // namespace

int64_t few_channels_workspace(const FewChannels& conv) {
  const dim3 blocks = few_blocks<Tile>(conv);
  return int64_t{blocks.x} * blocks.y * conv.channels * conv.taps * kFewTaps * kFewColumns * 4;
}

cudaError_t few_channels_wgrad(const FewChannels& conv, const void* image, const void* grad, void* workspace,
                               void* grad_weight, cudaStream_t stream) {
  const int steps = static_cast<int>(conv.channels) * conv.taps;
  const dim3 blocks = few_blocks<Tile>(conv);
  return dispatch_to_32_bits(conv.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch_tiles = [&](auto tiles) {
      constexpr int kTiles = decltype(tiles)::value;
      const int sums = kTiles * kGroups * kRowWords * 4, loads = Buffers<T>(Image(conv)).bytes;
      return LaunchConfig(blocks, kFewThreads + kFewLoaders, stream, loads > sums ? loads : sums)
          .launch(wgrad<T, kTiles>, conv, static_cast<int>(Tile::count(conv)), static_cast<const T*>(image),
                  static_cast<const T*>(grad), static_cast<float*>(workspace));
    };
    const auto error = steps <= 3 * 2 * kGroups ? launch_tiles(std::integral_constant<int, 3>{})
                                                : launch_tiles(std::integral_constant<int, 4>{});
    if (error) return error;
    return launch_dependent(add_blocks<T>, dim3(static_cast<unsigned>(steps * conv.taps), blocks.y), kFewThreads,
                            stream, conv, static_cast<int>(blocks.x), static_cast<const float*>(workspace),
                            static_cast<T*>(grad_weight));
  });
}

}  // namespace dpa::kernels::conv2d
