// Random tensors on the GPU, a convolution with what follows it in float64, and comparisons, for conv2d_bench.
#pragma once
#include <cmath>
#include <vector>

#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/conv2d/launch.h"
#include "test/kernels/device.h"

namespace dpa::test {

using namespace dpa::kernels;
using namespace dpa::kernels::conv2d;

inline std::vector<void*> owned;
inline void* allocate(size_t n, int fill) {
  void* p;
  CHECK(cudaMalloc(&p, n + 256));
  CHECK(cudaMemset(p, fill, n + 256));
  owned.push_back(p);
  return p;
}

inline __device__ float hashed(uint64_t i) {  // about normal
  float sum = 0;
  for (int k = 0; k < 4; k++) {
    uint64_t x = (i * 4 + k + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull, x = (x ^ (x >> 27)) * 0x94D049BB133111EBull, x ^= x >> 31;
    sum += static_cast<float>(x >> 40) / 16777216.0f - 0.5f;
  }
  return sum * 1.7f;
}
__global__ void random_floats(float* to, int64_t n, float size, float around, uint64_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll)
    to[i] = around + size * hashed(seed + i);
}
template <class T>
__global__ void random_rows(T* to, int64_t rows, int channels, int pitch, uint64_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < rows * pitch; i += gridDim.x * 256ll)
    to[i] = narrow<T>(i % pitch < channels ? hashed(seed + i) : 0.0f);
}

struct Weights {
  float *raw, *scale, *shift;
  void* packed;
};
inline Weights make_weights(const Shape& s, uint64_t& seed) {
  const int64_t n = static_cast<int64_t>(s.out_channels) * s.channels * s.kernel_height * s.kernel_width;
  Weights w = {static_cast<float*>(allocate(n * 4, 0xff)), static_cast<float*>(allocate(s.out_channels * 4, 0xff)),
               static_cast<float*>(allocate(s.out_channels * 4, 0xff)), allocate(weight_bytes(s), 0xff)};
  random_floats<<<256, 256>>>(w.raw, n, 1 / std::sqrt(static_cast<float>(n / s.out_channels)), 0, seed += 100000007);
  random_floats<<<4, 256>>>(w.scale, s.out_channels, 0.2f, 1, seed += 1009);
  random_floats<<<4, 256>>>(w.shift, s.out_channels, 0.2f, 0, seed += 1009);
  CHECK(launch_pack(s, w.raw, nullptr, w.packed, nullptr));
  return w;
}

// Reference: one output value a thread, in double; operands as the tensor cores take them. `even`: float32 halfway between two
// numbers of tf32 is rounded to the even one, as TMA does it, else away from zero.
template <class T>
__device__ double operand(const T* p, bool even = false) {
  if constexpr (sizeof(T) == 4) {
    const uint32_t bits = __float_as_uint(*p), half = even ? 0xfff + (bits >> 13 & 1) : 0x1000;
    return __uint_as_float((bits + half) & 0xffffe000u);
  } else {
    return widen(*p);
  }
}
template <class T>
__global__ void reference_conv(Shape s, const T* x, const float* weights, const float* bias, double* y, int pitch,
                               bool even) {
  const int64_t all = static_cast<int64_t>(s.batch) * s.out_height * s.out_width * s.out_channels;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < all; i += gridDim.x * 256ll) {
    const int k = i % s.out_channels, q = i / s.out_channels % s.out_width,
              p = i / s.out_channels / s.out_width % s.out_height, n = i / s.out_channels / s.out_width / s.out_height;
    double sum = bias ? bias[k] : 0;
    for (int r = 0; r < s.kernel_height; r++)
      for (int t = 0; t < s.kernel_width; t++) {
        const int h = p * s.stride - s.pad_top + r, w = q * s.stride - s.pad_left + t;
        if (h < 0 || w < 0 || h >= s.height || w >= s.width) continue;
        const T* row = x + ((static_cast<int64_t>(n) * s.height + h) * s.width + w) * pitch;
        for (int c = 0; c < s.channels; c++) {
          const float f =
              weights[((static_cast<int64_t>(k) * s.channels + c) * s.kernel_height + r) * s.kernel_width + t];
          T stored = narrow<T>(f);
          sum += operand(row + c, even) * operand(&stored);
        }
      }
    y[i] = sum;
  }
}
__global__ void reference_norm(Shape s, double* y, float eps) {  // a block: (sample, group)
  __shared__ double scratch[256];
  const int group = blockIdx.x % s.groups, n = blockIdx.x / s.groups, width = s.out_channels / s.groups;
  const int64_t pixels = static_cast<int64_t>(s.out_height) * s.out_width, count = pixels * width;
  double* base = y + n * pixels * s.out_channels + group * width;
  double mean = 0, result[2];
  for (int pass = 0; pass < 2; pass++) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < count; i += 256) {
      const double v = base[i / width * s.out_channels + i % width];
      sum += pass ? (v - mean) * (v - mean) : v;
    }
    scratch[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
      if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
      __syncthreads();
    }
    result[pass] = scratch[0] / count;
    mean = result[0];
    __syncthreads();
  }
  const double factor = 1 / sqrt(result[1] + eps);
  for (int64_t i = threadIdx.x; i < count; i += 256) {
    double& v = base[i / width * s.out_channels + i % width];
    v = (v - mean) * factor;
  }
}
// Applies what follows, compares: errors[0] the largest |made - wanted| / (1 + |wanted|), as the bits of a float.
template <class T>
__global__ void compare(Shape s, const double* y, const float* scale, const float* shift, const T* residual, int relu,
                        const T* made, int pitch, unsigned* worst, double* squares) {
  const int64_t rows = static_cast<int64_t>(s.batch) * s.out_height * s.out_width;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < rows * pitch; i += gridDim.x * 256ll) {
    const int k = i % pitch;
    double wanted = 0;
    if (k < s.out_channels) {
      wanted = y[i / pitch * s.out_channels + k] * scale[k] + shift[k];
      if (residual) wanted += widen(residual[i]);
      if (relu && wanted < 0) wanted = 0;
    }
    const double error = fabs(static_cast<double>(widen(made[i])) - wanted) / (1 + fabs(wanted));
    atomicMax(worst, __float_as_uint(error == error ? static_cast<float>(error) : 1e30f));
    atomicAdd(squares, error * error);
  }
}

// The same behind max pooling of 3 x 3, stride 2, padding 1.
template <class T>
__global__ void compare_pooled(Shape s, const double* y, const float* scale, const float* shift, int relu,
                               const T* made, unsigned* worst) {
  const int ph = (s.out_height - 1) / 2 + 1, pw = (s.out_width - 1) / 2 + 1, columns = s.out_channels;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < static_cast<int64_t>(s.batch) * ph * pw * columns;
       i += gridDim.x * 256ll) {
    const int k = i % columns, q = i / columns % pw, p = i / columns / pw % ph, n = i / columns / pw / ph;
    double wanted = -1e300;
    for (int h = max(2 * p - 1, 0); h < min(2 * p + 2, s.out_height); h++)
      for (int w = max(2 * q - 1, 0); w < min(2 * q + 2, s.out_width); w++) {
        const double x = y[((static_cast<int64_t>(n) * s.out_height + h) * s.out_width + w) * columns + k];
        wanted = max(wanted, x * scale[k] + shift[k]);
      }
    if (relu) wanted = max(wanted, 0.0);
    const double error = fabs(static_cast<double>(widen(made[i])) - wanted) / (1 + fabs(wanted));
    atomicMax(worst, __float_as_uint(error == error ? static_cast<float>(error) : 1e30f));
  }
}

}  // namespace dpa::test
