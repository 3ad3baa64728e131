// What both kernels of a convolution of few channels share: images in shared memory, and how taps become K or M.
//
// A step is a channel and a row of the filter: its taps, s, are padded to eight. A pixel (p, q) of the output meets
// under tap s of step (c, r) the image's (c, 2 p + r - padding, 2 q + s - padding), so in a plane of a channel neighbours
// in q lie two words apart, and those in s one: a fragment of an MMA is a word of the plane for each lane.
#pragma once
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/ptx_copy.cuh"
#include "kernels/cuda/conv2d/few_channels.h"

namespace dpa::kernels::conv2d {

// Of a block: threads that multiply, threads that load the next tile beside them, output channels.
constexpr int kFewThreads = 256, kFewLoaders = 128, kFewColumns = 64;
constexpr int kFewTaps = 8, kFewSteps = 28;  // most of a row, most rows of all channels

/// Where a tile of `kHigh` x `kWide` pixels of the output begins.
template <int kHigh, int kWide>
struct FewTile {
  int sample, row, column;

  __device__ FewTile(const FewChannels& conv, int tile) {
    const int wide = (static_cast<int>(conv.out_width) + kWide - 1) / kWide;
    const int high = (static_cast<int>(conv.out_height) + kHigh - 1) / kHigh;
    column = tile % wide * kWide, tile /= wide;
    row = tile % high * kHigh, sample = tile / high;
  }
  static int64_t count(const FewChannels& conv) {
    return conv.batch * ((conv.out_width + kWide - 1) / kWide) * ((conv.out_height + kHigh - 1) / kHigh);
  }
};

/// Blocks that take tiles in turn, by those that have 64 channels each.
template <class Tile>
dim3 few_blocks(const FewChannels& conv) {
  const int64_t tiles = Tile::count(conv), columns = (conv.out_channels + kFewColumns - 1) / kFewColumns;
  return {static_cast<unsigned>(tiles < multiprocessors() ? tiles : multiprocessors()), static_cast<unsigned>(columns)};
}

/// The part of an image under a tile, a plane for each channel.
template <int kHigh, int kWide>
struct FewImage {
  static constexpr int kColumns = 2 * kWide + kFewTaps - 2;

  int rows, plane, words;  // of a plane; of all

  __host__ __device__ explicit FewImage(const FewChannels& conv)
      : rows(2 * kHigh + conv.taps - 2), plane(rows * kColumns), words(plane * static_cast<int>(conv.channels)) {}
};

/// The number at `from` where it is `wanted`, else zero: nothing waits for it here.
template <class T>
__device__ __forceinline__ T load_if(const T* from, bool wanted) {
  if constexpr (sizeof(T) == 4) {
    T value;
    asm("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.f32 %0, [%1];\n}"
        : "=f"(value)
        : "l"(from), "r"(static_cast<int>(wanted)));
    return value;
  } else {
    uint16_t bits;
    asm("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nmov.b16 %0, 0;\n@p ld.global.nc.b16 %0, [%1];\n}"
        : "=h"(bits)
        : "l"(from), "r"(static_cast<int>(wanted)));
    return *reinterpret_cast<const T*>(&bits);
  }
}

/// What a loader loads of images: every kFewLoaders-th word of a tile's, sums alone leading from one to the next.
template <class T, int kHigh, int kWide>
class FewLoads {
 public:
  __device__ __forceinline__ explicit FewLoads(const FewChannels& conv)
      : shape_(conv),
        thread_(threadIdx.x - kFewThreads),
        step_(kRows * stride(conv, 2) + kRest * stride(conv, 3)),
        next_row_(stride(conv, 2) - kColumns * stride(conv, 3)),
        next_plane_(stride(conv, 1) - shape_.rows * stride(conv, 2)) {}

  /// Puts the tile's part of the image into shared memory.
  __device__ __forceinline__ void load(const FewChannels& conv, const T* image, const FewTile<kHigh, kWide>& at,
                                       uint32_t* to) const {
    image += at.sample * conv.image_strides[0];
    const int top = 2 * at.row - conv.padding, left = 2 * at.column - conv.padding;
    int row = thread_ / kColumns, column = thread_ % kColumns;
    int offset = (top + row) * stride(conv, 2) + (left + column) * stride(conv, 3);
    for (int first = thread_; first < shape_.words; first += kAtOnce * kFewLoaders) {
      T values[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        values[k] =
            load_if(image + offset, first + k * kFewLoaders < shape_.words &&
                                        static_cast<unsigned>(top + row) < static_cast<unsigned>(conv.height) &&
                                        static_cast<unsigned>(left + column) < static_cast<unsigned>(conv.width));
        offset += step_, row += kRows, column += kRest;
        if (column >= kColumns) column -= kColumns, ++row, offset += next_row_;
        if (row >= shape_.rows) row -= shape_.rows, offset += next_plane_;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (const int i = first + k * kFewLoaders; i < shape_.words) to[i] = ptx::to_tf32(widen(values[k]));
    }
  }

 private:
  static constexpr int kColumns = FewImage<kHigh, kWide>::kColumns, kAtOnce = 24;
  static constexpr int kRows = kFewLoaders / kColumns, kRest = kFewLoaders % kColumns;  // from word to word
  static_assert(kRows + 1 <= 2 * kHigh + 3, "a step enters one more plane at most");

  __device__ static int stride(const FewChannels& conv, int i) { return static_cast<int>(conv.image_strides[i]); }

  const FewImage<kHigh, kWide> shape_;
  const int thread_, step_, next_row_, next_plane_;
};

}  // namespace dpa::kernels::conv2d
