// Packed weights: for each chunk of K, for each 8 columns, 8 core matrices of 128 bytes, one for each piece of K: a piece of
// 16 bytes of each column. So ldmatrix reads fragments of B, wgmma reads it as it lies (without swizzle), and the columns of
// a tile are contiguous in a chunk, one bulk copy.
#pragma once
#include "kernels/cuda/conv2d/conv2d.h"
#include "kernels/cuda/conv2d/device.cuh"

namespace dpa::kernels::conv2d::device {

// Of cells of 2 x 2 pixels: cell row r, pixel row y of it, is row 2 r + y - 1 of the 7 x 7 filter.
DPA_DEVICE float weight_at(const Shape& s, const float* weights, int column, int channel, int r, int c, bool cells) {
  if (!cells) return weights[((int64_t{column} * s.channels + channel) * s.kernel_height + r) * s.kernel_width + c];
  const int pixel = channel / 3, y = 2 * r + pixel / 2 - 1, x = 2 * c + pixel % 2 - 1;
  return y >= 0 && x >= 0 ? weights[(column * 3 + channel % 3) * 49 + y * 7 + x] : 0.0f;
}

// A thread: words of the packed weights.
template <class T>
DPA_DEVICE void pack_weights(const Shape& s, int pieces, int chunks, const float* weights, const float* factor,
                             uint32_t* packed, bool cells = false) {
  constexpr int kPer = T::kElements / 4;  // numbers of a word
  const int groups = (s.out_channels + 15) / 16 * 2;
  const int64_t words = int64_t{groups} * chunks * 256;
#pragma unroll 1
  for (int64_t i = int64_t{block()} * kThreads + thread(); i < words; i += int64_t{blocks()} * kThreads) {
    const int word = static_cast<int>(i & 3), row = static_cast<int>(i >> 2 & 7), core = static_cast<int>(i >> 5 & 7);
    const int64_t rest = i >> 8;
    const int chunk = static_cast<int>(rest / groups), column = static_cast<int>(rest % groups) * 8 + row;
    const int piece = chunk * kChunkPieces + core, tap = piece / pieces;
    const int channel = (piece - tap * pieces) * T::kElements + word * kPer;
    const int r = tap / s.kernel_width, c = tap - r * s.kernel_width;
    float value[2] = {};
#pragma unroll
    for (int e = 0; e < kPer; e++)
      if (column < s.out_channels && channel + e < s.channels && r < s.kernel_height)
        value[e] = weight_at(s, weights, column, channel + e, r, c, cells) * (factor ? factor[column] : 1.0f);
    if constexpr (kPer == 1)
      packed[i] = to_tf32(value[0]);
    else
      packed[i] = pack(typename T::Math{}, value[0], value[1]);
  }
}

}  // namespace dpa::kernels::conv2d::device
