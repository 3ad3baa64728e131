// What is not a GEMM: pooling, keypoints, and the second pass of a GroupNorm. Work is spread over all blocks of a grid.
#pragma once
#include "kernels/cuda/conv2d/convolve.cuh"
#include "kernels/cuda/conv2d/stem.cuh"

namespace dpa::kernels::conv2d::device {

// A thread: a piece of a pixel of the output.
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

constexpr int kNormaliseRows = 64;     // of an item of work, at least
constexpr int kNormaliseGroups = 512;  // most

// In place: raw values and the moments of all tiles, to what `Conv` says. A block takes rows of a sample.
template <class T>
DPA_DEVICE void normalise(const Conv& v, uint32_t flag) {
  float2* factors = reinterpret_cast<float2*>(shared());
  const int samples = v.batch_rows / v.sample_rows, wanted = max(1, blocks() / samples);
  const int rows = max(kNormaliseRows, (v.sample_rows + wanted - 1) / wanted),
            parts = (v.sample_rows + rows - 1) / rows;
#pragma unroll 1
  for (int item = block(); item < samples * parts; item += blocks()) {
    const int n = item / parts, first = (item - n * parts) * rows;
    sync_block();
#pragma unroll 1
    for (int g = thread() >> 5; g < v.groups; g += kWarps) {
      const Moments m = moments_of_parts(v, n, g, g * v.group_channels / v.tile_columns, v.tile_columns, flag);
      if ((thread() & 31) == 0) factors[g] = {m.mean, inverse_root_exact(m.squares / m.count + v.eps)};
    }
    sync_block();
    const int count = min(rows, v.sample_rows - first) * v.out_pieces;
    const int64_t begin = (int64_t{n} * v.sample_rows + first) * v.out_pieces;
#pragma unroll 1
    for (int i = thread(); i < count; i += kThreads) {
      const int piece = i % v.out_pieces;
      uint4* at = static_cast<uint4*>(v.out) + begin + i;
      float x[T::kElements], more[T::kElements] = {};
      widen<T>(load_16(at), x);
      if (v.residual) widen<T>(load_16(static_cast<const uint4*>(v.residual) + begin + i), more);
#pragma unroll
      for (int e = 0; e < T::kElements; e++) {
        const int channel = piece * T::kElements + e;
        if (channel >= v.out_channels) {
          x[e] = 0.0f;
          continue;
        }
        const float2 f = factors[channel / v.group_channels];
        x[e] = (x[e] - f.x) * f.y * (v.scale ? v.scale[channel] : 1.0f) + (v.shift ? v.shift[channel] : 0.0f) + more[e];
        if (v.relu) x[e] = x[e] < 0.0f ? 0.0f : x[e];
      }
      store_16(at, narrow<T>(x));
    }
  }
}

}  // namespace dpa::kernels::conv2d::device
