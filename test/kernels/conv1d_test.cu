// The convolution's kernels against sums in float64 on random shapes, and their times: conv1d_test [test] [bench].
// Outputs are poisoned before and have a guard behind them; inputs are fresh random numbers, rounded as they are
// stored, or to tf32.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/conv1d/conv1d.h"
#include "kernels/plans/conv1d/mma_plan.h"
#include "kernels/plans/conv1d/plan.h"

namespace {

using namespace dpa::kernels;
using namespace dpa::kernels::conv1d;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, #call)

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

__device__ float noise(uint64_t seed, uint64_t i) {  // uniform on -1..1 (splitmix64)
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
__device__ void put_noise(T* x, int64_t rows, int64_t channels, int64_t width, uint64_t seed, float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * width;
       i += int64_t{gridDim.x} * blockDim.x)
    x[i] = rounded<T>(i % width < channels ? scale * noise(seed, i) : 0.f);
}

template <class T>
__global__ void fill(T* x, int64_t rows, int64_t channels, int64_t width, uint64_t seed, float scale) {
  put_noise(x, rows, channels, width, seed, scale);
}
// The same, delayed: the dependent launch has started long before.
template <class T>
__global__ void delayed_fill(T* x, int64_t rows, int64_t channels, int64_t width, uint64_t seed, float scale) {
  trigger_dependent_launch();
  grid_dependency_sync();
  for (int i = 0; i < 100; ++i) __nanosleep(1000);
  put_noise(x, rows, channels, width, seed, scale);
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
               widen(rounded<T>(weight[(i * c.x_channels + j) * c.taps + k]));
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
               widen(rounded<T>(weight[(i * c.x_channels + j) * c.taps + k]));
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

// group_norm_mish of the rows `y`, a block a group of a sample.
template <class T>
__global__ void slow_norm(Conv1d c, int group, double eps, const T* y, const float* weight, const float* bias,
                          const T* scale, const T* shift, int64_t stride, const T* residual, double* out) {
  __shared__ double statistics[2];
  const int64_t sample = blockIdx.x, first = blockIdx.y * group, of = c.y_length * group;
  const auto at = [&](int64_t e) { return (sample * c.y_length + e / group) * c.y_channels + first + e % group; };
  if (threadIdx.x == 0) {
    double sum = 0, squares = 0;
    for (int64_t e = 0; e < of; ++e) sum += widen(y[at(e)]);
    for (int64_t e = 0; e < of; ++e) squares += (widen(y[at(e)]) - sum / of) * (widen(y[at(e)]) - sum / of);
    statistics[0] = sum / of, statistics[1] = 1 / sqrt(squares / of + eps);
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e < of; e += blockDim.x) {
    const int64_t n = first + e % group, film = sample * stride + n;
    const double u = (widen(y[at(e)]) - statistics[0]) * statistics[1] * weight[n] + bias[n];
    const double mish = u * tanh(log1p(exp(u)));
    out[at(e)] = mish * (scale ? widen(scale[film]) : 1) + (shift ? widen(shift[film]) : 0) +
                 (residual ? widen(residual[at(e)]) : 0);
  }
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
        packed(c.taps * c.y_channels * x_width * sizeof(T)),
        transposed(c.taps * c.x_channels * y_width * sizeof(T)),
        bias(std::max(c.y_channels, c.x_channels) * 4),
        y_out(y_rows * c.y_channels * sizeof(T)),
        x_out(x_rows * c.x_channels * sizeof(T)),
        y_residual(y_out.bytes),
        x_residual(x_out.bytes),
        gradient(weights * 4),
        half_gradient(weights * sizeof(T)),
        workspace(wgrad_workspace(c)) {
    put<T>(y, y_rows, c.y_channels, y_width, seed, 1);
    put<T>(x, x_rows, c.x_channels, x_width, seed + 1, 1);
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
    return {{{weight.data, to.data, c.y_channels, c.x_channels, c.taps}}, 1};
  }
  template <class S>
  static void put(Buffer& to, int64_t rows, int64_t channels, int64_t width, uint64_t seed, float scale) {
    fill<S><<<1024, 256>>>(reinterpret_cast<S*>(to.data), rows, channels, width, seed, scale);
  }
  void run_fprop(bool addends, cudaStream_t stream = 0) {
    const Addends add{addends ? bias.data : nullptr, DType::kFloat32, addends ? y_residual.data : nullptr};
    CHECK(fprop(c, x.data, {packed.data, prefetchable}, add, y_out.data, stream));
  }
  void run_dgrad(bool addends, cudaStream_t stream = 0) {
    const Addends add{addends ? bias.data : nullptr, DType::kFloat32, addends ? x_residual.data : nullptr};
    CHECK(dgrad(c, y.data, {kFloat ? transposed.data : packed.data, prefetchable}, add, x_out.data, stream));
  }
  void run_wgrad(bool half, cudaStream_t stream = 0) {
    CHECK(wgrad(c, y.data, x.data, half ? half_gradient.data : gradient.data, half ? c.dtype : DType::kFloat32,
                workspace.data, stream));
  }
};

// Whether convolutions whose input is still being written when they are launched give the same bits.
template <class T>
bool waits_for_delayed_input(Case<T>& t, uint64_t seed, bool addends) {
  const auto y_once = to_host<uint16_t>(t.y_out), x_once = to_host<uint16_t>(t.x_out);
  for (auto* buffer : {&t.x, &t.y, &t.y_out, &t.x_out}) CHECK(cudaMemset(buffer->data, 0xFF, buffer->bytes));
  CHECK(launch_dependent(delayed_fill<T>, 64, 256, 0, reinterpret_cast<T*>(t.x.data), t.x_rows, t.c.x_channels,
                         t.x_width, seed + 1, 1.0f));
  t.run_fprop(addends);
  CHECK(launch_dependent(delayed_fill<T>, 64, 256, 0, reinterpret_cast<T*>(t.y.data), t.y_rows, t.c.y_channels,
                         t.y_width, seed, 1.0f));
  t.run_dgrad(addends);
  CHECK(cudaDeviceSynchronize());
  const auto gradient_once = to_host<uint32_t>(t.gradient);
  for (auto* buffer : {&t.x, &t.gradient}) CHECK(cudaMemset(buffer->data, 0xFF, buffer->bytes));
  CHECK(launch_dependent(delayed_fill<T>, 64, 256, 0, reinterpret_cast<T*>(t.x.data), t.x_rows, t.c.x_channels,
                         t.x_width, seed + 1, 1.0f));
  t.run_wgrad(false);
  CHECK(cudaDeviceSynchronize());
  return y_once == to_host<uint16_t>(t.y_out) && x_once == to_host<uint16_t>(t.x_out) &&
         gradient_once == to_host<uint32_t>(t.gradient);
}

template <class T>
T* as(Buffer& buffer) {
  return reinterpret_cast<T*>(buffer.data);
}

template <class T>
bool test_case(const Conv1d& c, uint64_t seed, bool addends) {
  Case<T> t(c, seed);
  constexpr bool kFloat = std::is_same_v<T, float>;
  const double unit = kFloat ? 1.01 / (1 << 24) : std::is_same_v<T, __half> ? 0.501 / 1024 : 0.501 / 128;
  // In float32 the stored values hide nothing of what an instruction cuts off its running sum.
  const double terms = c.taps * std::max(c.x_channels, c.y_channels), running = 0.1 * std::sqrt(terms) + 0.1;
  const double slack = kFloat ? (terms / 8 + c.taps * 4 + 8) * running / (1 << 23) : 2e-5;
  const float* bias = addends ? as<float>(t.bias) : nullptr;
  t.run_fprop(addends), t.run_dgrad(addends), t.run_wgrad(false), t.run_wgrad(true);
  CHECK(cudaDeviceSynchronize());
  Buffer y_exact(t.y_out.bytes / sizeof(T) * 8), x_exact(t.x_out.bytes / sizeof(T) * 8), wgrad_exact(t.weights * 8),
      wgrad_lost(t.weights * 8);
  slow_fprop<T><<<2048, 256>>>(c, as<T>(t.x), as<float>(t.weight), bias, addends ? as<T>(t.y_residual) : nullptr,
                               as<double>(y_exact), t.x_width);
  slow_dgrad<T><<<2048, 256>>>(c, as<T>(t.y), as<float>(t.weight), bias, addends ? as<T>(t.x_residual) : nullptr,
                               as<double>(x_exact), t.y_width);
  int multiprocessors;
  CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  WgradPlan plan = plan_wgrad(c, multiprocessors);
  int flat = 0;
  if (!has_wgmma() || !wgmma_takes_taps(c)) {
    const auto mma = plan_mma_wgrad(c, multiprocessors);
    plan.splits = mma.splits, plan.rows.count = mma.steps, flat = mma.step_rows;
    if (kFloat) plan.rows.count = c.batch * c.y_length / 8 / kTf32Times + 1;
  }
  slow_wgrad<T><<<2048, 256>>>(c, plan, flat, as<T>(t.y), as<T>(t.x), as<double>(wgrad_exact), as<double>(wgrad_lost),
                               t.y_width, t.x_width);
  CHECK(cudaDeviceSynchronize());
  const double g = worst(to_host<T>(t.y_out), to_host<double>(y_exact), unit, slack);
  const double s = worst(to_host<T>(t.x_out), to_host<double>(x_exact), unit, slack);
  // The blocks of a tile add their sums, each addition rounded to nearest.
  const double nearest = std::max(8, plan.splits) / double(1 << 24), tiny = 1e-7;
  const auto lost = to_host<double>(wgrad_lost), sums = to_host<double>(wgrad_exact);
  const double w = worst(to_host<float>(t.gradient), sums, nearest, tiny, lost);
  const double h = worst(to_host<T>(t.half_gradient), sums, unit, tiny, lost);
  const bool guards = t.y_out.guard_intact() && t.x_out.guard_intact() && t.gradient.guard_intact() &&
                      t.half_gradient.guard_intact() && t.packed.guard_intact() && t.transposed.guard_intact() &&
                      t.workspace.guard_intact();
  // The same call again must give the same bits.
  const auto once = to_host<float>(t.gradient);
  const auto once_out = to_host<uint16_t>(t.y_out);
  t.run_wgrad(false), t.run_fprop(addends);
  CHECK(cudaDeviceSynchronize());
  const auto again = to_host<float>(t.gradient);
  const bool repeats =
      std::memcmp(once.data(), again.data(), t.gradient.bytes) == 0 && once_out == to_host<uint16_t>(t.y_out);
  const bool late = waits_for_delayed_input(t, seed, addends);
  const bool good = g <= 1 && s <= 1 && w <= 1 && h <= 1 && guards && repeats && late;
  if (!good || seed < 2000)
    std::printf(
        "%s B %lld y %lldx%lld x %lldx%lld k %d s %d p %d: fprop %.2f dgrad %.2f wgrad %.2f %.2f%s%s "
        "%s%s\n",
        kFloat                      ? "tf32"
        : std::is_same_v<T, __half> ? "f16 "
                                    : "bf16",
        (long long)c.batch, (long long)c.y_length, (long long)c.y_channels, (long long)c.x_length,
        (long long)c.x_channels, c.taps, c.stride, c.padding, g, s, w, h, guards ? "" : " GUARD",
        repeats ? "" : " UNSTEADY", late ? "" : " EARLY", good ? "ok" : "WRONG");
  return good;
}

bool test_shape(DType dtype, int64_t batch, int64_t length, int64_t y_channels, int64_t x_channels, int taps,
                int stride, uint64_t seed, bool addends) {
  const int padding = stride == 2 && taps == 4 ? 1 : taps / 2;
  const int64_t y_length = (length + 2 * padding - taps) / stride + 1;
  if (y_length <= 0) return true;
  const Conv1d c{dtype, batch, y_length, y_channels, length, x_channels, taps, stride, padding};
  if (!takes(c)) return std::printf("not served: T %d k %d s %d\n", int(length), taps, stride), false;
  if (dtype == DType::kFloat32) return test_case<float>(c, seed, addends);
  return dtype == DType::kFloat16 ? test_case<__half>(c, seed, addends) : test_case<__nv_bfloat16>(c, seed, addends);
}

// fprop with a normalisation after it, and a shortcut beside it where the kernels take one: the convolution against
// float64, the normalisation against float64 of the convolution's own rounded output.
template <class T>
bool test_normalised(const Conv1d& c, int group, uint64_t seed, bool film, bool residual, bool concatenated) {
  constexpr bool kFloat = std::is_same_v<T, float>;
  const double unit = kFloat ? 1.01 / (1 << 24) : std::is_same_v<T, __half> ? 0.501 / 1024 : 0.501 / 128;
  const double terms = c.taps * c.x_channels, running = 0.1 * std::sqrt(terms) + 0.1;
  const double slack = kFloat ? (terms / 8 + c.taps * 4 + 8) * running / (1 << 23) : 2e-5;
  const bool beside = takes_shortcut(c, group);
  concatenated = concatenated && beside && c.x_channels > 64;
  Case<T> t(c, seed);
  Conv1d one = c;
  one.taps = 1, one.padding = 0;
  Case<T> s(one, seed + 100);
  const int64_t channels = c.y_channels, stride = channels + 8, first = concatenated ? 64 : c.x_channels;
  Buffer parameters(channels * 8), films(2 * c.batch * stride * sizeof(T)), out(t.y_out.bytes),
      exact(t.y_rows * channels * 8), x_first(t.x_rows * padded(first) * sizeof(T)),
      x_more(t.x_rows * padded(c.x_channels - first) * sizeof(T) + 16);
  Case<T>::template put<float>(parameters, 2, channels, channels, seed + 6, 1);
  Case<T>::template put<T>(films, 2 * c.batch, stride, stride, seed + 7, 1);
  if (concatenated) {
    const size_t row = t.x_width * sizeof(T), head = first * sizeof(T), more = padded(c.x_channels - first) * sizeof(T);
    CHECK(cudaMemcpy2D(x_first.data, head, t.x.data, row, head, t.x_rows, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpy2D(x_more.data, more, t.x.data + head, row, more, t.x_rows, cudaMemcpyDeviceToDevice));
  }
  CHECK(cudaDeviceSynchronize());
  const T *scale = as<T>(films), *shift = scale + c.batch * stride;
  const float* weight = as<float>(parameters);
  const Normalisation norm{group,
                           1e-5,
                           DType::kFloat32,
                           weight,
                           weight + channels,
                           film ? scale : nullptr,
                           shift,
                           stride,
                           stride,
                           residual ? t.y_residual.data : nullptr,
                           out.data};
  const Addends add{t.bias.data, DType::kFloat32, nullptr}, add_side{s.bias.data, DType::kFloat32, nullptr};
  const Shortcut side{{s.packed.data, true}, add_side, s.y_out.data};
  const ConvInput input = concatenated ? ConvInput{x_first.data, x_more.data, first} : ConvInput{t.x.data};
  const auto run = [&](void* y) {
    CHECK(cudaMemset(out.data, 0xFF, out.bytes));
    CHECK(fprop_normalised(c, input, {t.packed.data, true}, add, y, norm, beside ? side : Shortcut{}, 0));
    CHECK(cudaDeviceSynchronize());
  };
  run(t.y_out.data);
  slow_fprop<T>
      <<<2048, 256>>>(c, as<T>(t.x), as<float>(t.weight), as<float>(t.bias), nullptr, as<double>(exact), t.x_width);
  CHECK(cudaDeviceSynchronize());
  const double conv = worst(to_host<T>(t.y_out), to_host<double>(exact), unit, slack);
  slow_norm<T><<<dim3(c.batch, channels / group), 128>>>(c, group, 1e-5, as<T>(t.y_out), weight, weight + channels,
                                                         norm.scale ? scale : nullptr, shift, stride,
                                                         residual ? as<T>(t.y_residual) : nullptr, as<double>(exact));
  CHECK(cudaDeviceSynchronize());
  const double normalised = worst(to_host<T>(out), to_host<double>(exact), unit, kFloat ? 1e-5 : 2e-5);
  double shortcut = 0;
  if (beside) {
    slow_fprop<T>
        <<<2048, 256>>>(one, as<T>(t.x), as<float>(s.weight), as<float>(s.bias), nullptr, as<double>(exact), t.x_width);
    CHECK(cudaDeviceSynchronize());
    shortcut = worst(to_host<T>(s.y_out), to_host<double>(exact), unit, slack);
  }
  const auto once = to_host<uint16_t>(out);
  bool repeats = true;
  for (int i = 0; i < 3; ++i) run(nullptr), repeats = repeats && once == to_host<uint16_t>(out);
  const bool guards = out.guard_intact() && t.y_out.guard_intact() && s.y_out.guard_intact();
  const bool good = conv <= 1 && normalised <= 1 && shortcut <= 1 && repeats && guards;
  int multiprocessors;
  CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  const auto plan = plan_normalised(c, group, multiprocessors);
  if (!good || seed < 2000)
    std::printf(
        "norm %s B %lld T %lld %lldx%lld k %d group %d: conv %.2f norm %.2f shortcut %s%.2f, splits %d exchange %d "
        "step %d%s%s %s\n",
        kFloat                      ? "tf32"
        : std::is_same_v<T, __half> ? "f16 "
                                    : "bf16",
        (long long)c.batch, (long long)c.y_length, (long long)c.y_channels, (long long)c.x_channels, c.taps, group,
        conv, normalised, beside ? concatenated ? "of two " : "" : "none ", shortcut, plan.splits, plan.exchange,
        plan.column_step, guards ? "" : " GUARD", repeats ? "" : " UNSTEADY", good ? "ok" : "WRONG");
  return good;
}

int run_norm_tests() {
  int wrong = 0, served = 0;
  uint64_t seed = std::random_device{}() % 1000;
  std::printf("seed of the normalised %llu\n", (unsigned long long)seed);
  const auto try_one = [&](DType type, int64_t batch, int64_t length, int64_t channels, int64_t in, int taps,
                           int group) {
    const Conv1d c{type, batch, length, channels, length, in, taps, 1, taps / 2};
    if (!takes(c) || !normalises(c, group)) return false;
    const uint64_t s = seed += 13;
    const bool film = s % 2, residual = s % 3, two = s % 5 > 1;
    const bool good = type == DType::kFloat32   ? test_normalised<float>(c, group, s, film, residual, two)
                      : type == DType::kFloat16 ? test_normalised<__half>(c, group, s, film, residual, two)
                                                : test_normalised<__nv_bfloat16>(c, group, s, film, residual, two);
    wrong += !good, ++served;
    return true;
  };
  for (const auto type : {DType::kBFloat16, DType::kFloat32}) {
    for (int level = 0; level < 3; ++level) {  // the networks' own
      const int64_t c = 512 << level;
      try_one(type, 8, 64 >> level, c, level ? c / 2 : 6, 5, c / 8), try_one(type, 8, 64 >> level, c, c, 5, c / 8);
      try_one(type, 16, 16 >> level, c, c, 5, c / 8), try_one(type, 16, 48 >> level, c / 2, c / 2, 5, c / 16);
      try_one(type, 28, 32 >> level, c / 2, c / 4, 3, c / 16), try_one(type, 64, 16 >> level, 384, 384, 5, 48);
    }
    try_one(type, 8, 16, 1024, 4096, 5, 128), try_one(type, 8, 32, 512, 2048, 5, 64);
    try_one(type, 4, 128, 256, 256, 5, 32), try_one(type, 1, 12, 640, 320, 3, 80),
        try_one(type, 300, 48, 256, 256, 5, 32);
  }
  std::mt19937 random(std::random_device{}());
  seed = 2000 + random() % 100000;
  const auto pick = [&](int low, int high) { return static_cast<int>(low + random() % (high - low + 1)); };
  constexpr DType types[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  for (int i = 0; i < 160; ++i) {
    const int groups[] = {8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 120, 128, 256};
    const int group = groups[pick(0, 13)], taps[] = {1, 3, 5, 7};
    const int64_t in = pick(0, 2) ? pick(1, 8) * 64 : pick(1, 300);
    try_one(types[i % 3], pick(1, i % 4 ? 20 : 90), pick(1, 128), int64_t{group} * pick(1, 8), in, taps[pick(0, 3)],
            group);
  }
  std::printf("%s: %d wrong of %d normalised\n", wrong ? "FAILED" : "passed", wrong, served);
  return wrong;
}

int run_tests() {
  int wrong = 0;
  uint64_t seed = std::random_device{}() % 1000;
  std::printf("seed %llu\n", (unsigned long long)seed);
  const auto try_one = [&](DType dtype, int64_t b, int64_t l, int64_t n, int64_t w, int k, int s, bool add) {
    wrong += !test_shape(dtype, b, l, n, w, k, s, seed += 7, add);
  };
  constexpr auto kB = DType::kBFloat16;
  for (const auto type : {kB, DType::kFloat32}) {  // the networks' own
    try_one(type, 64, 16, 256, 256, 5, 1, false), try_one(type, 64, 8, 512, 512, 5, 1, true);
    try_one(type, 64, 4, 1024, 1024, 5, 1, true), try_one(type, 64, 16, 256, 2, 5, 1, true);
    try_one(type, 64, 16, 2, 256, 1, 1, true), try_one(type, 64, 16, 256, 256, 3, 2, true);
    try_one(type, 64, 16, 256, 256, 4, 2, true), try_one(type, 256, 16, 512, 256, 1, 1, false);
    try_one(type, 1024, 16, 256, 256, 5, 1, true), try_one(type, 3, 48, 256, 256, 5, 1, true);
    try_one(type, 64, 16, 192, 96, 7, 1, true), try_one(type, 16, 64, 320, 192, 3, 1, true);
  }
  std::mt19937 random(std::random_device{}());
  seed = 2000 + random() % 100000;
  const auto pick = [&](int low, int high) { return static_cast<int>(low + random() % (high - low + 1)); };
  constexpr DType types[] = {DType::kFloat32, kB, DType::kFloat16};
  for (int i = 0; i < 180; ++i) {
    const int taps_of[] = {1, 3, 4, 5, 5, pick(1, 9)};
    const int taps = taps_of[pick(0, 5)], stride = taps == 4 ? 2 : taps == 3 ? pick(1, 2) : 1;
    const int length = (i % 4 == 0 ? pick(65, 300) : pick(1, 64)) * (taps == 4 ? 2 : 1);
    try_one(types[i % 3], pick(1, i % 4 ? 20 : 90), length, pick(1, i % 5 ? 150 : 600), pick(1, i % 5 ? 150 : 600),
            taps, stride, i % 7 > 2);
  }
  std::printf("%s: %d wrong\n", wrong ? "FAILED" : "passed", wrong);
  return wrong;
}

// Median time of one call within a graph of `kCalls`, in microseconds.
template <class F>
double graph_time(F&& call) {
  constexpr int kCalls = 20, kRuns = 9;
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  call(stream);
  CHECK(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kCalls; ++i) call(stream);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t start, stop;
  CHECK(cudaEventCreate(&start)), CHECK(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int i = 0; i < kRuns + 2; ++i) {
    CHECK(cudaEventRecord(start, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(stop, stream));
    CHECK(cudaEventSynchronize(stop));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 2) times.push_back(ms * 1000 / kCalls);
  }
  std::sort(times.begin(), times.end());
  CHECK(cudaGraphExecDestroy(exec)), CHECK(cudaGraphDestroy(graph)), CHECK(cudaStreamDestroy(stream));
  return times[times.size() / 2];
}

template <class T>
void run_bench(DType type, double rate) {
  std::printf("%22s %5s %.0f %18s %18s %18s %8s   us (TFLOP/s), splits\n", "B T y x k s", "at", rate, "fprop", "dgrad",
              "wgrad", "pack");
  struct Row {
    int64_t batch, length, y_channels, x_channels;
    int taps, stride;
  };
  std::vector<Row> rows;
  for (int64_t batch : {64, 256, 1024})
    for (int level = 0; level < 3; ++level) rows.push_back({batch, 16 >> level, 256 << level, 256 << level, 5, 1});
  rows.push_back({64, 4, 2048, 2048, 5, 1});
  rows.push_back({64, 8, 512, 2048, 5, 1});
  rows.push_back({256, 8, 512, 2048, 5, 1});
  rows.push_back({256, 16, 256, 256, 3, 2});
  rows.push_back({256, 16, 256, 256, 4, 2});
  rows.push_back({256, 8, 512, 2048, 1, 1});
  rows.push_back({256, 16, 256, 2, 5, 1});
  rows.push_back({64, 32, 256, 256, 5, 1});
  rows.push_back({64, 64, 512, 512, 5, 1});
  rows.push_back({64, 32, 1024, 1024, 5, 1});
  rows.push_back({128, 4, 384, 384, 5, 1});
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  for (const auto& r : rows) {
    const int padding = r.stride == 2 ? 1 : r.taps / 2;
    const Conv1d c{type, r.batch, r.length / r.stride, r.y_channels, r.length, r.x_channels, r.taps, r.stride, padding};
    Case<T> t(c, 1);
    const double work = 2.0 * r.batch * (r.length / r.stride) * r.y_channels * r.x_channels * r.taps;
    const double g = graph_time([&](cudaStream_t s) { t.run_fprop(true, s); });
    const double x = graph_time([&](cudaStream_t s) { t.run_dgrad(true, s); });
    const double w = graph_time([&](cudaStream_t s) { t.run_wgrad(false, s); });
    const double p =
        graph_time([&](cudaStream_t s) { CHECK(pack_weights(DType::kFloat32, c.dtype, t.packings(), s)); });
    const double q =
        Case<T>::kFloat ? graph_time([&](cudaStream_t s) { CHECK(pack_weights_transposed(t.packings(true), s)); }) : 0;
    const int multiprocessors = properties.multiProcessorCount;
    auto fprop_plan = plan_fprop(c, multiprocessors), dgrad_plan = plan_dgrad(c, multiprocessors);
    auto wgrad_plan = plan_wgrad(c, multiprocessors);
    if (!has_wgmma()) {  // the tile's rows in the place of its blocks
      fprop_plan = plan_mma_fprop(c, multiprocessors).conv, fprop_plan.splits = fprop_plan.tile_rows;
      dgrad_plan = plan_mma_dgrad(c, multiprocessors).conv, dgrad_plan.splits = dgrad_plan.tile_rows;
      wgrad_plan.splits = plan_mma_wgrad(c, multiprocessors).splits;
    }
    std::printf(
        "%5lld %2lld %4lld %4lld %d %d %10.1f %7.1f (%3.0f) %dx%d %7.1f (%3.0f) %dx%d %7.1f (%3.0f) %dx%d %8.1f "
        "%8.1f\n",
        (long long)r.batch, (long long)r.length, (long long)r.y_channels, (long long)r.x_channels, r.taps, r.stride,
        work / rate / 1e6, g, work / g / 1e6, fprop_plan.tile_columns, fprop_plan.splits, x, work / x / 1e6,
        dgrad_plan.tile_columns, dgrad_plan.splits, w, work / w / 1e6, wgrad_plan.height, wgrad_plan.splits, p, q);
  }
}

}  // namespace

int main(int count, char** arguments) {
  int wrong = 0;
  for (int i = 1; i < count; ++i) {
    if (arguments[i] == std::string("test")) wrong += run_tests() + run_norm_tests();
    if (arguments[i] == std::string("conv")) wrong += run_tests();
    if (arguments[i] == std::string("norm")) wrong += run_norm_tests();
    if (arguments[i] == std::string("bench")) {
      run_bench<__nv_bfloat16>(DType::kBFloat16, 600);
      run_bench<float>(DType::kFloat32, 300);
    }
  }
  return wrong != 0;
}
