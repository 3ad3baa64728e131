// A convolution on the GPU with random tensors, its three GEMMs, and the same in float64, for conv1d_test and its bench.
// Outputs are poisoned before and have a guard behind them; inputs are fresh random numbers, rounded as they are
// stored, or to tf32.
#pragma once
#include <cmath>
#include <cstring>

#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/conv1d/conv1d.h"
#include "kernels/plans/conv1d/mma_plan.h"
#include "kernels/plans/conv1d/plan.h"
#include "test/kernels/device.h"

namespace dpa::test {

using namespace dpa::kernels;
using namespace dpa::kernels::conv1d;

int run_norm_tests();  // how many are wrong
void run_bench();

constexpr size_t kGuard = 4096;  // bytes behind every tensor that no kernel may change

struct Buffer {
  size_t bytes;
  uint8_t* data = nullptr;
  explicit Buffer(size_t size) : bytes(size) {
    CHECK(cudaMalloc(&data, bytes + kGuard));
    CHECK(cudaMemset(data, 0xFF, bytes + kGuard));
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  bool guard_intact() const {
    std::vector<uint8_t> guard(kGuard);
    CHECK(cudaMemcpy(guard.data(), data + bytes, kGuard, cudaMemcpyDeviceToHost));
    for (uint8_t byte : guard)
      if (byte != 0xFF) return false;
    return true;
  }
};

inline __device__ float noise(uint64_t seed, uint64_t i) {  // uniform on -1..1 (splitmix64)
  uint64_t z = seed * 0x9E3779B97F4A7C15ull + i * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return static_cast<float>(z >> 40) / 8388608.0f - 1.0f;
}

// What the tensor cores make of a value: of float32 a tf32.
template <class T>
__device__ T rounded(float value) {
  if constexpr (std::is_same_v<T, float>)
    return __uint_as_float(ptx::to_tf32(value) & 0xFFFFE000);
  else
    return narrow<T>(value);
}

template <class T>
__device__ void put_noise(T* x, int64_t rows, int64_t channels, int64_t width, uint64_t seed, float scale, bool whole) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * width;
       i += int64_t{gridDim.x} * blockDim.x) {
    const float value = i % width < channels ? scale * noise(seed, i) : 0.f;
    x[i] = whole ? narrow<T>(value) : rounded<T>(value);
  }
}

// A weight as the kernels multiply it: rounded, or, of two parts, nearly itself (2^-22 of it).
template <class T>
__device__ double multiplied(const Conv1d& c, float w) {
  const bool parts = std::is_same_v<T, float> && c.y_channels * c.x_channels * c.taps <= kMostInTwoParts;
  return parts ? double(w) : double(widen(rounded<T>(w)));
}

template <class T>
__global__ void fill(T* x, int64_t rows, int64_t channels, int64_t width, uint64_t seed, float scale, bool whole) {
  put_noise(x, rows, channels, width, seed, scale, whole);
}
// The three formulas of conv1d.h, a thread an output element.
template <class T>
__global__ void slow_fprop(Conv1d c, const T* x, const float* weight, const float* bias, const T* residual, double* out,
                           int64_t width) {
  const int64_t total = c.batch * c.y_length * c.y_channels;
  for (int64_t e = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; e < total; e += int64_t{gridDim.x} * blockDim.x) {
    const int64_t i = e % c.y_channels, t = e / c.y_channels % c.y_length, b = e / c.y_channels / c.y_length;
    double sum = (bias ? bias[i] : 0) + (residual ? static_cast<double>(widen(residual[e])) : 0);
    for (int k = 0; k < c.taps; ++k) {
      const int64_t u = c.stride * t + k - c.padding;
      if (u < 0 || u >= c.x_length) continue;
      for (int64_t j = 0; j < c.x_channels; ++j)
        sum += double(widen(x[(b * c.x_length + u) * width + j])) *
               multiplied<T>(c, weight[(i * c.x_channels + j) * c.taps + k]);
    }
    out[e] = sum;
  }
}
template <class T>
__global__ void slow_dgrad(Conv1d c, const T* y, const float* weight, const float* bias, const T* residual, double* out,
                           int64_t width) {
  const int64_t total = c.batch * c.x_length * c.x_channels;
  for (int64_t e = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; e < total; e += int64_t{gridDim.x} * blockDim.x) {
    const int64_t j = e % c.x_channels, u = e / c.x_channels % c.x_length, b = e / c.x_channels / c.x_length;
    double sum = (bias ? bias[j] : 0) + (residual ? static_cast<double>(widen(residual[e])) : 0);
    for (int k = 0; k < c.taps; ++k) {
      const int64_t t = u + c.padding - k;
      if (t < 0 || t % c.stride != 0 || t / c.stride >= c.y_length) continue;
      for (int64_t i = 0; i < c.y_channels; ++i)
        sum += double(widen(y[(b * c.y_length + t / c.stride) * width + i])) *
               multiplied<T>(c, weight[(i * c.x_channels + j) * c.taps + k]);
    }
    out[e] = sum;
  }
}
// Beside the sum, what float32 addition on the tensor cores may lose of it: an instruction adds 16 rows' terms to
// the running sum of its block and cuts off what lies below the last place of the largest of them, 2^-23 of it.
// Terms are at most 1. The kernel's plan says which rows a block adds, in which order; `flat` rows, where it is not 0,
// are contracted in one step, whatever the samples. An instruction in tf32 adds 8
// rows, and in another order, for which the largest running sum of this one stands.
template <class T>
__global__ void slow_wgrad(Conv1d c, WgradPlan plan, int flat, const T* y, const T* x, double* out, double* lost,
                           int64_t y_width, int64_t x_width) {
  const int64_t total = c.y_channels * c.x_channels * c.taps;
  for (int64_t e = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; e < total; e += int64_t{gridDim.x} * blockDim.x) {
    const int64_t k = e % c.taps, j = e / c.taps % c.x_channels, i = e / c.taps / c.x_channels;
    double sum = 0, running = 0, cut = 0, largest = 0;
    int64_t block = 0;
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t t = 0; t < c.y_length; ++t) {
        const RowTiles& rows = plan.rows;
        const int64_t at = b * c.y_length + t;
        const int64_t piece = flat                   ? at / flat
                              : rows.per_sample == 1 ? b / rows.samples
                                                     : b * rows.per_sample + t / rows.time;
        const int64_t row =
            flat ? at % flat : (rows.per_sample == 1 ? b % rows.samples * rows.time : 0) + t % rows.time;
        while (!std::is_same_v<T, float> && piece >= rows.count * (block + 1) / plan.splits) ++block, running = 0;
        const int64_t u = c.stride * t + k - c.padding;
        const double term = u < 0 || u >= c.x_length ? 0
                                                     : double(widen(y[(b * c.y_length + t) * y_width + i])) *
                                                           widen(x[(b * c.x_length + u) * x_width + j]);
        sum += term, running += term;
        largest = fmax(largest, fabs(sum));
        const bool ends = t + 1 == c.y_length && ((!flat && rows.per_sample > 1) || b + 1 == c.batch);
        const bool last = row + 1 == (flat ? flat : rows.time * rows.samples) || ends;
        if (row % 16 == 15 || last) cut += (fabs(running) + 1) / (1 << 23);
      }
    }
    if (std::is_same_v<T, float>) cut = double(plan.rows.count) * kTf32Times * (2 * largest + 1) / (1 << 23);
    out[e] = sum, lost[e] = cut;
  }
}

// What instructions, each of so many terms, may cut off a running sum: float32 hides nothing of it, and 16 bits do not
// where a sum comes back to almost zero.
template <class T>
double cut_off(int taps, int64_t channels) {
  const double terms = static_cast<double>(taps) * channels, running = 0.1 * std::sqrt(terms) + 0.1;
  return (terms / (sizeof(T) == 4 ? 8 : 16) + taps * 4 + 8) * running / (1 << 23);
}

// The largest error in units of what rounding allows: half a unit of the stored type, and `slack` for the sums, beside
// what `lost` says of each element.
template <class T>
double worst(const std::vector<T>& got, const std::vector<double>& exact, double unit, double slack,
             const std::vector<double>& lost = {}) {
  double result = 0;
  bool found = false;
  for (size_t i = 0; i < exact.size(); ++i) {
    double value;
    if constexpr (std::is_same_v<T, float>) {
      value = got[i];
    } else {
      uint32_t bits = 0;
      std::memcpy(&bits, &got[i], 2);
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        bits <<= 16;
        float x;
        std::memcpy(&x, &bits, 4);
        value = x;
      } else {
        value = __half2float(got[i]);
      }
    }
    const double allowed = unit * std::abs(exact[i]) + slack + (lost.empty() ? 0 : lost[i]);
    const double error = std::abs(value - exact[i]) / allowed;
    if (!(error <= result)) result = error;  // NaN counts
    if (!(error <= 1) && !found)
      std::printf("first wrong: element %zu of %zu, %.9g for %.9g\n", i, exact.size(), value, exact[i]), found = true;
  }
  return result;
}

template <class T>
std::vector<T> to_host(const Buffer& buffer) {
  std::vector<T> host(buffer.bytes / sizeof(T));
  CHECK(cudaMemcpy(host.data(), buffer.data, buffer.bytes, cudaMemcpyDeviceToHost));
  return host;
}

// A convolution's tensors, filled, and its three GEMMs.
template <class T>
struct Case {
  static constexpr bool kFloat = std::is_same_v<T, float>;
  Conv1d c;
  bool prefetchable = true;
  int64_t y_rows, x_rows, y_width, x_width, weights;
  Buffer y, x, weight, packed, transposed, bias, y_out, x_out, y_residual, x_residual, gradient, half_gradient,
      workspace;

  Case(const Conv1d& conv, uint64_t seed)
      : c(conv),
        y_rows(c.batch * c.y_length),
        x_rows(c.batch * c.x_length),
        y_width(padded(c.y_channels)),
        x_width(padded(c.x_channels)),
        weights(c.y_channels * c.x_channels * c.taps),
        y(y_rows * y_width * sizeof(T)),
        x(x_rows * x_width * sizeof(T)),
        weight(weights * 4),
        packed(weight_parts(c) * c.taps * c.y_channels * x_width * sizeof(T)),
        transposed(weight_parts(c) * c.taps * c.x_channels * y_width * sizeof(T)),
        bias(std::max(c.y_channels, c.x_channels) * 4),
        y_out(y_rows * c.y_channels * sizeof(T)),
        x_out(x_rows * c.x_channels * sizeof(T)),
        y_residual(y_out.bytes),
        x_residual(x_out.bytes),
        gradient(weights * 4),
        half_gradient(weights * sizeof(T)),
        workspace(std::max({wgrad_workspace(c), fprop_workspace(c, 0), dgrad_workspace(c)})) {
    put<T>(y, y_rows, c.y_channels, y_width, seed, 1, in_full(c));
    put<T>(x, x_rows, c.x_channels, x_width, seed + 1, 1, in_full(c));
    put<float>(weight, c.y_channels, c.x_channels * c.taps, c.x_channels * c.taps, seed + 2, 0.1f);
    put<float>(bias, 1, bias.bytes / 4, bias.bytes / 4, seed + 3, 1);
    put<T>(y_residual, y_rows, c.y_channels, c.y_channels, seed + 4, 1);
    put<T>(x_residual, x_rows, c.x_channels, c.x_channels, seed + 5, 1);
    CHECK(pack_weights(DType::kFloat32, c.dtype, packings(), 0));
    if (kFloat) CHECK(pack_weights_transposed(packings(true), 0));
    CHECK(cudaDeviceSynchronize());  // the weights are prefetchable
  }
  Packings packings(bool of_transposed = false) const {
    const auto& to = of_transposed ? transposed : packed;
    return {{{weight.data, to.data, c.y_channels, c.x_channels, c.taps, 0, 0, weight_parts(c)}}, 1};
  }
  const void* fprop_weights() const { return c.in_place ? weight.data : packed.data; }
  const void* dgrad_weights() const { return c.in_place ? weight.data : kFloat ? transposed.data : packed.data; }
  template <class S>
  static void put(Buffer& to, int64_t rows, int64_t channels, int64_t width, uint64_t seed, float scale,
                  bool whole = false) {
    fill<S><<<1024, 256>>>(reinterpret_cast<S*>(to.data), rows, channels, width, seed, scale, whole);
  }
  void run_fprop(bool addends, cudaStream_t stream = 0) {
    const Addends add{addends ? bias.data : nullptr, DType::kFloat32, {addends ? y_residual.data : nullptr}};
    CHECK(fprop(c, {x.data}, {fprop_weights(), prefetchable}, add, y_out.data, workspace.data, stream));
  }
  void run_dgrad(bool addends, cudaStream_t stream = 0) {
    const Addends add{addends ? bias.data : nullptr, DType::kFloat32, {addends ? x_residual.data : nullptr}};
    CHECK(dgrad(c, y.data, {dgrad_weights(), prefetchable}, add, {x_out.data}, workspace.data, stream));
  }
  void run_wgrad(bool half, cudaStream_t stream = 0) {
    CHECK(wgrad(c, y.data, {x.data}, half ? half_gradient.data : gradient.data, half ? c.dtype : DType::kFloat32,
                workspace.data, stream));
  }
};

// Rows of `channels` of T that are whole vectors, in two tensors, or one.
struct Halves {
  size_t row, head, tail, rows;  // bytes
  Buffer first, more;

  Halves(size_t size, int64_t rows, int64_t channels, int64_t of_first)
      : row(channels * size),
        head(of_first * size),
        tail(row - head),
        rows(rows),
        first(rows * head),
        more(rows * tail) {}
  void take(const Buffer& whole) {
    CHECK(cudaMemcpy2D(first.data, head, whole.data, row, head, rows, cudaMemcpyDeviceToDevice));
    if (tail == 0) return;
    CHECK(cudaMemcpy2D(more.data, tail, whole.data + head, row, tail, rows, cudaMemcpyDeviceToDevice));
  }
  void give(Buffer& whole) const {
    CHECK(cudaMemcpy2D(whole.data, row, first.data, head, head, rows, cudaMemcpyDeviceToDevice));
    if (tail == 0) return;
    CHECK(cudaMemcpy2D(whole.data + head, row, more.data, tail, tail, rows, cudaMemcpyDeviceToDevice));
  }
};

template <class T>
T* as(Buffer& buffer) {
  return reinterpret_cast<T*>(buffer.data);
}

}  // namespace dpa::test
