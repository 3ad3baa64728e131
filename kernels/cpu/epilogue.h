// The epilogue of a GEMM: bias, GroupNorm, Mish, FiLM, residual, and the store to where the value is read.
//
//   task     a range of whole groups of one sample, C' channels x T times; channels fill the vectors
//   passes   sums of each channel over time; with the groups' means, the squares; with the groups' deviations, the
//            values
//   scratch  two numbers a channel: offset = bias - mean, factor = gamma / deviation
#pragma once
#include <cmath>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/lanes.h"

namespace dpa::kernels::cpu::DPA_LEVEL {

/// Where channel c0's numbers of sample b begin.
struct EpilogueTask {
  int b, begin, end;  // channels
  const float* raw;   // of time 0 and channel 0
  float *offset, *factor;
};

/// For each channel of the task: the sum over time of raw + offset, or of its square, into `to`.
template <bool kSquares>
DPA_INLINE void sums_over_time(const Epilogue& f, const EpilogueTask& task, const float* offsets, float* to) {
  for (int c = task.begin; c < task.end; c += kLanes) {
    const Floats offset = load_first(offsets + c, f.channels - c);
    Floats total = {};
    for (int t = 0; t < f.times; t++) {
      const Floats x = load(task.raw + static_cast<int64_t>(t) * f.pitch + c) + offset;
      total += kSquares ? x * x : x;
    }
    store(to + c, total);
  }
}

inline double total(const float* from, int count) {
  typedef float Four __attribute__((vector_size(16)));
  typedef double FourDoubles __attribute__((vector_size(32)));
  FourDoubles sums = {};
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    Four x;
    std::memcpy(&x, from + i, sizeof x);
    sums += __builtin_convertvector(x, FourDoubles);
  }
  double sum = (sums[0] + sums[2]) + (sums[1] + sums[3]);
  for (; i < count; i++) sum += from[i];
  return sum;
}

inline void statistics(const Epilogue& f, const EpilogueTask& task) {
  constexpr double kEps = 1e-5;
  const int group = f.channels / f.groups;
  const double count = static_cast<double>(group) * f.times;
  sums_over_time<false>(f, task, f.bias, task.factor);
  for (int c0 = task.begin; c0 < task.end; c0 += group) {
    const auto mean = static_cast<float>(total(task.factor + c0, group) / count);
    if (f.overflow && !std::isfinite(mean)) f.overflow->store(true, std::memory_order_relaxed);
    for (int c = c0; c < c0 + group; c++) task.offset[c] = f.bias[c] - mean;
  }
  sums_over_time<true>(f, task, task.offset, task.factor);
  for (int c0 = task.begin; c0 < task.end; c0 += group) {
    const auto inverse = static_cast<float>(1 / std::sqrt(total(task.factor + c0, group) / count + kEps));
    for (int c = c0; c < c0 + group; c++) task.factor[c] = inverse * f.norm[c];
  }
}

/// Writes the value of channels c .. c + kLanes - 1 at a time of sample b, where there is a destination.
DPA_INLINE void write(const Destination& to, int b, int t, int c, Floats value) {
  if (!to.data) return;
  const int64_t at = b * to.sample + t * to.time + c;
  if (to.dtype == DType::kFloat32) return store(static_cast<float*>(to.data) + at, value);
  auto* const halves = static_cast<uint16_t*>(to.data) + at;
#ifdef DPA_FLOAT16
  if (to.dtype == DType::kFloat16) return store_float16(halves, value);
#endif
#ifdef DPA_TILES
  if (to.low) return store_two_bfloat16(halves, halves + to.low, value);
#endif
  store_halves(halves, to_bfloat16(value));
}

/// The values of kLanes channels from c on, at every time.
inline void epilogue_channels(const Epilogue& f, const EpilogueTask& task, int c) {
  const int valid = f.channels - c;
  Floats offset, factor = splat(1.0f), beta = {}, scale = splat(1.0f), shift = {}, residual_bias = {};
  if (f.norm) {
    offset = load(task.offset + c), factor = load(task.factor + c);
    beta = load_first(f.norm + f.channels + c, valid);
  } else {
    offset = load_first(f.bias + c, valid);
  }
  if (f.film[0]) {
    if (f.film_scale) scale = Floats{};
    for (int i = 0; i < 2; i++) {
      if (!f.film[i]) continue;
      const float* film = f.film[i] + task.b * f.film_sample[i] + c;
      if (f.film_scale) scale += load_first(film, valid);
      shift += load_first(film + (f.film_scale ? f.channels : 0), valid);
    }
  }
  if (f.residual_bias) residual_bias = load_first(f.residual_bias + c, valid);
  for (int t = 0; t < f.times; t++) {
    const int64_t at = static_cast<int64_t>(task.b * static_cast<int64_t>(f.times) + t) * f.pitch + c;
    Floats value = (load(f.raw + at) + offset) * factor + beta;
    if (f.norm) value = (f.relu ? rectified(value) : mish(value)) * scale + shift;
    if (f.residual) value += load(f.residual + at) + residual_bias;
    if (valid < kLanes) value = keep_first(value, valid);
    if (f.keep) store(f.keep + at, value);
    write(f.next, task.b, t, c, value);
    write(f.skip, task.b, t, c, value);
  }
}

inline void epilogue(const Epilogue& f, int64_t begin, int64_t end) {
  const int ranges = (f.channels + f.channels_per_task - 1) / f.channels_per_task;
  for (int64_t i = begin; i < end; i++) {
    EpilogueTask task;
    task.b = static_cast<int>(i / ranges);
    task.begin = static_cast<int>(i % ranges) * f.channels_per_task;
    task.end = task.begin + f.channels_per_task < f.channels ? task.begin + f.channels_per_task : f.channels;
    task.raw = f.raw + static_cast<int64_t>(task.b) * f.times * f.pitch;
    task.offset = f.scratch + static_cast<int64_t>(task.b) * 2 * f.pitch;
    task.factor = task.offset + f.pitch;
    if (f.norm) statistics(f, task);
    // The last task also writes the zeros of the padded channels, whatever their scratch holds.
    const int last = task.end == f.channels ? f.pitch : task.end;
    for (int c = task.begin; c < last; c += kLanes) epilogue_channels(f, task, c);
  }
}

}  // namespace dpa::kernels::cpu::DPA_LEVEL
