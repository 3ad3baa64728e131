// A warp's MMAs of one step of mma_convolution.cuh: 64 rows by 32 columns of its slices of K, by ldmatrix.
//
//   multiply_step  into the sums
//   add_parts      of float32 in full (`in_full`, shape.h): rows are split into two tf32 numbers as they are read
//   add_step       of high halves
// The last two have a sum of their own for a slice or two, which is added rounded to the nearest.
#pragma once
#include "kernels/cuda/conv1d/mma_device.cuh"

namespace dpa::kernels::conv1d {

// Where a lane's first sixteen bytes of weights lie in a stage.
template <bool kMajorN>
DPA_DEVICE uint32_t lane_weights(int column) {
  const int lane = device::thread() % 32;
  if constexpr (kMajorN) return (column / 64 * 64 + lane % 16) * 128 + ((column % 64 / 8 + lane / 16 ^ lane & 7) << 4);
  const int row = column + lane / 16 * 8 + lane % 8;
  return row * 128 + ((lane / 8 % 2 ^ row & 7) << 4);
}

// A lane's weights of the warp's 32 columns, of a slice of 32 bytes of K. The slice permutes the places of sixteen bytes
// as the row does.
template <class T, bool kMajorN>
DPA_DEVICE void load_weights(uint32_t (&b)[2][4], uint32_t weights, int slice) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if constexpr (kMajorN)
      device::load_matrix_x4_transposed(b[n], (weights ^ n << 5) + slice * 2048);
    else
      device::load_matrix_x4(b[n], (weights ^ slice << 5) + n * 2048);
#pragma unroll
    for (int i = 0; i < 4; ++i) round_operand<T>(b[n][i]);
  }
}

// The MMAs of a warp in one step, on its slices.
template <class T, class Shape, bool kMajorN>
DPA_DEVICE void multiply_step(float (&sums)[4][4][4], const uint32_t (&rows)[4], uint32_t weights, int group) {
  // More of them would spill.
  constexpr int kUnrolled = Shape::kGroups == 1 ? (kMajorN ? 1 : 2) : Shape::kGroups == 2 && kIsFloat<T> ? 1 : 4;
#pragma unroll kUnrolled
  for (int s = 0; s < Shape::kSlices; s += Shape::kGroups) {
    const int slice = s + group;
    uint32_t b[2][4];
    load_weights<T, kMajorN>(b, weights, slice);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      uint32_t a[4];
      device::load_matrix_x4(a, rows[m] ^ slice << 5);
#pragma unroll
      for (int i = 0; i < 4; ++i) round_operand<T>(a[i]);
      const uint4 rounded = {a[0], a[1], a[2], a[3]};
#pragma unroll
      for (int n = 0; n < 4; ++n) device::mma(T{}, sums[m][n], rounded, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
  }
}

// The same of float32 in full: of the weights' first parts, and of the second ones at `rest`. An MMA cuts off what lies
// below the last place of its sum, so each slice has a sum of its own.
template <class Shape>
DPA_DEVICE void add_parts(float (&sums)[4][4][4], const uint32_t (&rows)[4], uint32_t weights, uint32_t rest,
                          int group) {
#pragma unroll 1
  for (int s = 0; s < Shape::kSlices; s += Shape::kGroups) {
    const int slice = s + group;
    uint32_t b[2][4], b_rest[2][4];
    load_weights<float, /*kMajorN=*/false>(b, weights, slice);
    load_weights<float, /*kMajorN=*/false>(b_rest, rest, slice);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      uint32_t values[4], a[4], a_rest[4];
      device::load_matrix_x4(values, rows[m] ^ slice << 5);
#pragma unroll
      for (int i = 0; i < 4; ++i) split_operand(values[i], a[i], a_rest[i]);
      const uint4 first = {a[0], a[1], a[2], a[3]}, second = {a_rest[0], a_rest[1], a_rest[2], a_rest[3]};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int at = n % 2 * 2;
        float sum[4] = {};
        device::mma(float{}, sum, second, b[n / 2][at], b[n / 2][at + 1]);
        device::mma(float{}, sum, first, b_rest[n / 2][at], b_rest[n / 2][at + 1]);
        device::mma(float{}, sum, first, b[n / 2][at], b[n / 2][at + 1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[m][n][e] += sum[e];
      }
    }
  }
}

// The same of high halves: the sum of two slices, or of the one that a warp has, and then that of all.
template <class T, class Shape, bool kMajorN>
DPA_DEVICE void add_step(float (&sums)[4][4][4], const uint32_t (&rows)[4], uint32_t weights, int group) {
  constexpr int kOwn = Shape::kSlices / Shape::kGroups, kTogether = kOwn > 1 ? 2 : 1;
#pragma unroll 1
  for (int s = 0; s < kOwn; s += kTogether) {
    const auto slice = [&](int i) { return (s + i) * Shape::kGroups + group; };
    uint32_t b[kTogether][2][4];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) load_weights<T, kMajorN>(b[i], weights, slice(i));
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      uint4 a[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        uint32_t v[4];
        device::load_matrix_x4(v, rows[m] ^ slice(i) << 5);
        a[i] = {v[0], v[1], v[2], v[3]};
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float sum[4] = {};
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
          device::mma(T{}, sum, a[i], b[i][n / 2][n % 2 * 2], b[i][n / 2][n % 2 * 2 + 1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[m][n][e] += sum[e];
      }
    }
  }
}

}  // namespace dpa::kernels::conv1d
