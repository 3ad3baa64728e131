// What is not a GEMM: pooling, keypoints, and the second pass of a GroupNorm. Work is spread over all blocks of a grid.
#pragma once
#include "kernels/cuda/conv2d/convolve.cuh"
#include "kernels/cuda/conv2d/stem.cuh"

namespace dpa::kernels::conv2d::device {

// Rows of pieces, dealt out to the threads of a block: one piece of every few rows each. Where a row has more pieces than a
// block has threads, a thread has several, one after the other.
struct RowShare {
  int width, height, row;  // threads along a row, rows at once, this thread's; `height` and more have none
  DPA_DEVICE explicit RowShare(int pieces)
      : width(min(pieces, kThreads)), height(kThreads / width), row(thread() / width) {}
  DPA_DEVICE int first_piece() const { return thread() - row * width; }
};
constexpr int kLeastRows = 32;  // of a block that makes the factors of a sample

// The factors of a sample's groups, by all warps of the block, in shared memory.
DPA_DEVICE void make_group_factors(const Conv& v, int sample, uint32_t flag) {
  float2* factors = reinterpret_cast<float2*>(shared());
  sync_block();  // those of the sample before have been read
#pragma unroll 1
  for (int g = thread() >> 5; g < v.groups; g += kWarps) {
    const Moments m = moments_of_parts(v, sample, g, g * v.group_channels / v.tile_columns, v.tile_columns, flag);
    if ((thread() & 31) == 0) factors[g] = {m.mean, inverse_root_exact(m.squares / m.count + v.eps)};
  }
  sync_block();
}
// Of the channels of a piece: x becomes (x - mean) factor + shift; padding stays zero.
template <class T>
struct Normalisation {
  float mean[T::kElements], factor[T::kElements], shift[T::kElements];
  DPA_DEVICE Normalisation(const Conv& v, int piece) {
    const float2* factors = reinterpret_cast<const float2*>(shared());
#pragma unroll
    for (int e = 0; e < T::kElements; e++) {
      const int channel = piece * T::kElements + e;
      mean[e] = factor[e] = shift[e] = 0.0f;
      if (channel >= v.out_channels) continue;
      const float2 f = factors[channel / v.group_channels];
      mean[e] = f.x, factor[e] = f.y * (v.scale ? v.scale[channel] : 1.0f);
      shift[e] = v.shift ? v.shift[channel] : 0.0f;
    }
  }
  DPA_DEVICE void apply(float (&x)[T::kElements]) const {
#pragma unroll
    for (int e = 0; e < T::kElements; e++) x[e] = (x[e] - mean[e]) * factor[e] + shift[e];
  }
};
template <class T>
DPA_DEVICE void rectify(float (&x)[T::kElements]) {
#pragma unroll
  for (int e = 0; e < T::kElements; e++) x[e] = x[e] < 0.0f ? 0.0f : x[e];
}

// Windows of 3 x 3. A block: a run of output pixels; all pixels of a window are loaded at once, and in the place of those
// beyond an edge their neighbours inside, which the window has, too. `kNormalised`: of raw values, with the moments of
// their tiles (`RawMaps`).
template <class T, bool kNormalised>
DPA_DEVICE void max_pool_3x3(const Pool& p, const Conv& norm, uint32_t flag) {
  constexpr int kSize = 3;
  const RowShare share(p.pieces);
  const int sample = p.out_height * p.out_width, all = p.batch * sample, least = kNormalised ? kLeastRows : 1;
  const int rows = max(least, (all + blocks() - 1) / blocks());
  const int end = min((block() + 1) * rows, all);
#pragma unroll 1
  for (int first = block() * rows, last; first < end; first = last) {
    const int n = first / sample;
    last = min(end, (n + 1) * sample);
    if (kNormalised) make_group_factors(norm, n, flag);
    if (share.row >= share.height) continue;
    const uint4* image = static_cast<const uint4*>(p.x) + int64_t{n} * p.height * p.width * p.pieces;
#pragma unroll 1
    for (int piece = share.first_piece(); piece < p.pieces; piece += share.width) {
      const Normalisation<T> normalisation(norm, kNormalised ? piece : p.pieces);
#pragma unroll 1
      for (int r = first + share.row; r < last; r += share.height) {
        const int y = (r - n * sample) / p.out_width, x = r - n * sample - y * p.out_width;
        uint4 loaded[kSize][kSize];
#pragma unroll
        for (int i = 0; i < kSize; i++)
#pragma unroll
          for (int j = 0; j < kSize; j++) {
            const int from_y = min(max(y * p.stride - p.padding + i, 0), p.height - 1);
            const int from_x = min(max(x * p.stride - p.padding + j, 0), p.width - 1);
            loaded[i][j] = image[int64_t{from_y * p.width + from_x} * p.pieces + piece];  // read again: by L1
          }
        float best[T::kElements], value[T::kElements];
#pragma unroll
        for (int i = 0; i < kSize; i++)
#pragma unroll
          for (int j = 0; j < kSize; j++) {
            widen<T>(loaded[i][j], value);
            if (kNormalised) normalisation.apply(value);
#pragma unroll
            for (int e = 0; e < T::kElements; e++) best[e] = i + j == 0 ? value[e] : larger_or_nan(value[e], best[e]);
          }
        if (kNormalised && norm.relu) rectify<T>(best);
        store_16(static_cast<uint4*>(p.out) + int64_t{r} * p.pieces + piece, narrow<T>(best));
      }
    }
  }
}

// Other windows. A thread: a piece of a pixel of the output.
template <class T>
DPA_DEVICE void max_pool(const Pool& p) {
  const int all = p.batch * p.out_height * p.out_width * p.pieces;
#pragma unroll 1
  for (int i = block() * kThreads + thread(); i < all; i += blocks() * kThreads) {
    int at = i / p.pieces;
    const int piece = i - at * p.pieces, q = at % p.out_width;
    at /= p.out_width;
    const int row = at % p.out_height, n = at / p.out_height;
    const int y0 = row * p.stride - p.padding, x0 = q * p.stride - p.padding;
    float best[T::kElements];
#pragma unroll
    for (int e = 0; e < T::kElements; e++) best[e] = as_float(0xff800000u);
#pragma unroll 1
    for (int y = max(y0, 0); y < min(y0 + p.kernel, p.height); y++)
#pragma unroll 3
      for (int x = max(x0, 0); x < min(x0 + p.kernel, p.width); x++) {
        const int64_t from = (int64_t{n * p.height + y} * p.width + x) * p.pieces + piece;
        float value[T::kElements];
        widen<T>(static_cast<const uint4*>(p.x)[from], value);  // neighbours read it again: by L1
#pragma unroll
        for (int e = 0; e < T::kElements; e++) best[e] = larger_or_nan(value[e], best[e]);
      }
    store_16(static_cast<uint4*>(p.out) + i, narrow<T>(best));
  }
}

// A warp: a piece of the channels of a sample; lanes take pixels.
template <class T>
DPA_DEVICE void average_pool(const Pool& p) {
  const int lane = thread() & 31, pixels = p.height * p.width;
#pragma unroll 1
  for (int i = block() * kWarps + (thread() >> 5); i < p.batch * p.pieces; i += blocks() * kWarps) {
    const int n = i / p.pieces, piece = i - n * p.pieces;
    const uint4* from = static_cast<const uint4*>(p.x) + int64_t{n} * pixels * p.pieces + piece;
    float sum[T::kElements] = {};
    constexpr int kTogether = 8;  // loads in flight
#pragma unroll 1
    for (int begin = lane; begin < pixels; begin += 32 * kTogether) {
      uint4 loaded[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; k++) {
        const int at = begin + 32 * k;
        loaded[k] = at < pixels ? load_16(from + int64_t{at} * p.pieces) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int k = 0; k < kTogether; k++) {
        float x[T::kElements];
        widen<T>(loaded[k], x);
#pragma unroll
        for (int e = 0; e < T::kElements; e++) sum[e] += x[e];
      }
    }
#pragma unroll
    for (int e = 0; e < T::kElements; e++) {
      sum[e] = sum_of_warp(sum[e]);
      const int channel = piece * T::kElements + e;
      if (lane == 0 && channel < p.channels)
        static_cast<float*>(p.out)[n * p.channels + channel] = sum[e] / static_cast<float>(pixels);
    }
  }
}

// A warp: a piece of the channels of a sample, keypoints; lanes take pixels.
template <class T>
DPA_DEVICE void spatial_softmax(const Pool& p) {
  const int lane = thread() & 31, pixels = p.height * p.width;
  const float step_x = p.width > 1 ? 2.0f / static_cast<float>(p.width - 1) : 0.0f,
              step_y = p.height > 1 ? 2.0f / static_cast<float>(p.height - 1) : 0.0f;
#pragma unroll 1
  for (int i = block() * kWarps + (thread() >> 5); i < p.batch * p.pieces; i += blocks() * kWarps) {
    const int n = i / p.pieces, piece = i - n * p.pieces;
    const uint4* from = static_cast<const uint4*>(p.x) + int64_t{n} * pixels * p.pieces + piece;
    float most[T::kElements], x[T::kElements];
#pragma unroll
    for (int e = 0; e < T::kElements; e++) most[e] = as_float(0xff800000u);
#pragma unroll 1
    for (int at = lane; at < pixels; at += 32) {
      widen<T>(load_16(from + int64_t{at} * p.pieces), x);
#pragma unroll
      for (int e = 0; e < T::kElements; e++) most[e] = larger_or_nan(x[e] * p.inverse_temperature, most[e]);
    }
#pragma unroll
    for (int e = 0; e < T::kElements; e++)
#pragma unroll 1
      for (int mask = 16; mask > 0; mask /= 2) most[e] = larger_or_nan(most[e], shuffle_xor(most[e], mask));
    float sum[T::kElements] = {}, sum_x[T::kElements] = {}, sum_y[T::kElements] = {};
#pragma unroll 1
    for (int at = lane; at < pixels; at += 32) {
      const int row = at / p.width;
      const float y = -1.0f + static_cast<float>(row) * step_y,
                  column = -1.0f + static_cast<float>(at - row * p.width) * step_x;
      widen<T>(load_16(from + int64_t{at} * p.pieces), x);
#pragma unroll
      for (int e = 0; e < T::kElements; e++) {
        const float w = exponential(x[e] * p.inverse_temperature - most[e]);
        sum[e] += w, sum_x[e] += w * column, sum_y[e] += w * y;
      }
    }
#pragma unroll
    for (int e = 0; e < T::kElements; e++) {
      const float all = sum_of_warp(sum[e]), mean_x = sum_of_warp(sum_x[e]) / all, mean_y = sum_of_warp(sum_y[e]) / all;
      const int channel = piece * T::kElements + e;
      if (lane == 0 && channel < p.channels) {
        float* to = static_cast<float*>(p.out) + (n * p.channels + channel) * 2;
        to[0] = mean_x, to[1] = mean_y;
      }
    }
  }
}

// In place: raw values and the moments of all tiles, to what `Conv` says. A block takes a run of rows, a thread a piece of a
// few of them, and loads the next ones before: the first ones while the factors of the sample's groups are made.
template <class T>
DPA_DEVICE void normalise(const Conv& v, uint32_t flag) {
  constexpr int kTogether = 2;
  const RowShare share(v.out_pieces);
  const int rows = max(kLeastRows, (v.batch_rows + blocks() - 1) / blocks()), step = kTogether * share.height;
  const int end = min((block() + 1) * rows, v.batch_rows);
  const bool takes_part = share.row < share.height;
  uint4 raw[kTogether], more[kTogether];
#pragma unroll 1
  for (int first = block() * rows, last; first < end; first = last) {
    const int n = first / v.sample_rows;
    last = min(end, (n + 1) * v.sample_rows);
    const auto at = [&](const void* base, int row, int piece) {
      return reinterpret_cast<uint4*>(const_cast<void*>(base)) + int64_t{row} * v.out_pieces + piece;
    };
    const auto load = [&](int begin, int piece) {
#pragma unroll
      for (int k = 0; k < kTogether; k++) {
        const int row = begin + k * share.height;
        raw[k] = row < last ? load_16(at(v.out, row, piece)) : make_uint4(0, 0, 0, 0);
        more[k] = v.residual && row < last ? load_16(at(v.residual, row, piece)) : make_uint4(0, 0, 0, 0);
      }
    };
    if (takes_part) load(first + share.row, share.first_piece());
    make_group_factors(v, n, flag);
    if (!takes_part) continue;
#pragma unroll 1
    for (int piece = share.first_piece(); piece < v.out_pieces; piece += share.width) {
      const Normalisation<T> normalisation(v, piece);
#pragma unroll 1
      for (int begin = first + share.row; begin < last; begin += step) {
        uint4 values[kTogether], residuals[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; k++) values[k] = raw[k], residuals[k] = more[k];
        if (begin + step < last)
          load(begin + step, piece);
        else if (piece + share.width < v.out_pieces)
          load(first + share.row, piece + share.width);
#pragma unroll
        for (int k = 0; k < kTogether; k++) {
          float x[T::kElements], y[T::kElements];
          widen<T>(values[k], x), widen<T>(residuals[k], y);
          normalisation.apply(x);
#pragma unroll
          for (int e = 0; e < T::kElements; e++) x[e] += y[e];
          if (v.relu) rectify<T>(x);
          if (const int row = begin + k * share.height; row < last) store_16(at(v.out, row, piece), narrow<T>(x));
        }
      }
    }
  }
}

}  // namespace dpa::kernels::conv2d::device
