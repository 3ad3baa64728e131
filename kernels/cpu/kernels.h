// What a level (an instruction set) must be able to do, as a table of functions. The same sources are compiled once a
// level; choose_kernels gives the table.
//
// Channels are padded to multiples of 16 everywhere: 16 channels are one cache line of floats and one panel of weights.
// Padded channels hold zeros, so that sums may run over them. Nothing here allocates.
#pragma once
#include <atomic>
#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/cpu/images.h"
#include "kernels/cpu/level.h"
#include "kernels/cpu/panels.h"

namespace dpa::kernels::cpu {

/// A convolution over neighbouring times as one GEMM: in a buffer of rows (time, channel) with zeros around the
/// sample, the inputs of one output are `depth` = taps * pitch consecutive numbers.
///   output[b, t, o] = sum_i weights[o, i] * input[b, t * stride_time + i]
/// Weights lie in panels of 16 outputs, in each the inputs in order: a step is one word for each of the 16 outputs.
struct Gemm {
  Weights kind;
  const void* input;                 // of the first tap of time 0 of sample 0
  int64_t input_sample, input_time;  // elements from sample to sample, from one output's inputs to the next's
  int64_t input_low;                 // elements to what rounding to bfloat16 left over, where inputs are sums of two
  const uint32_t* weights;
  int steps;  // words a panel and output: depth, or depth / 2 for 16-bit weights
  int steps_per_tap;
  float* output;
  int64_t output_sample, output_time;  // floats; panel p begins at 16 p
  int batch, times, panels;
  int stride, first, times_in;  // tap i of output time t reads input time t * stride + first + i
};
/// How a GEMM is cut into tasks: groups of panels x ranges of rows (a row is one time of one sample).
struct Tasks {
  int panels = 1, rows = 1;  // rows: row tiles where weights are in tiles
  int64_t count = 0;
};

/// A GEMM's rows in tiles of at most 16 that are one stride apart: samples of one time, or times of one sample.
struct RowTiles {
  bool samples;               // of one time; else times of one sample
  int lines, per_line, rows;  // so many times (or samples) of so many tiles, of so many rows
  int count() const { return lines * per_line; }
};
constexpr int kTileRows = 16;
inline RowTiles row_tiles(const Gemm& gemm) {
  const auto cut = [](bool samples, int lines, int length) {
    const int tiles = (length + kTileRows - 1) / kTileRows;
    return RowTiles{samples, lines, tiles, (length + tiles - 1) / tiles};
  };
  const RowTiles samples = cut(true, gemm.times, gemm.batch), times = cut(false, gemm.batch, gemm.times);
  return samples.count() <= times.count() ? samples : times;  // of one time, taps outside of the samples are left out
}

/// Where a value is written as the input of a GEMM.
struct Destination {
  void* data = nullptr;  // of time 0 and channel 0 of sample 0; null for none
  DType dtype = DType::kFloat32;
  int64_t sample = 0, time = 0;  // elements
  int64_t low = 0;  // elements to where the rest of a value is written that rounding to bfloat16 leaves over, or 0
};

/// What becomes of a GEMM's output, `raw`:
///   value = raw + bias;  norm: value = mish(group_norm(value) * gamma + beta) * scale + shift, or relu(...) likewise;
///   add: value += residual
/// A task is a range of whole groups of one sample.
struct Epilogue {
  const float* raw;        // (B, T, pitch)
  const float* bias;       // (C)
  const float* norm;       // gamma (C), beta (C), or null
  const float* film[2];    // two terms of scale (C, where film_scale) and shift (C); null: no FiLM, no term
  int64_t film_sample[2];  // floats from sample to sample
  bool film_scale, relu;
  const float* residual;       // (B, T, pitch), or null
  const float* residual_bias;  // (C), or null
  int batch, times, channels, pitch, groups, channels_per_task;
  Destination next, skip;       // the next GEMM's input, and a skip's
  float* scratch;               // (B, 2, pitch)
  float* keep;                  // (B, T, pitch): the residual of a later GEMM, or null
  std::atomic<bool>* overflow;  // set where a group's mean is infinite or NaN, or null
};

/// out[n, r] = act(sum_c weights[r, c] * in[n, c] + bias[r]), rows of weights as in the original layer.
struct Dense {
  DType dtype;
  const void* weights;
  const float* bias;  // or null
  const float* in;
  float* out;
  int samples, rows, columns;
  bool mish;  // act is mish; else nothing
};

/// out[n, r] = sum_c weights[r, c] * in[n, c], both in bfloat16, with sums in float32.
struct Pairs {
  const uint16_t *weights, *in;
  float* out;
  int64_t samples, rows, columns;
};

/// out[c] = sum_i in[i] * weights[i * channels + c]
struct Narrow {
  const float* weights;
  const float* in;
  float* out;
  int inputs, channels;
};

struct Kernels {
  int max_panels;    // of a task
  Weights bfloat16;  // how bfloat16 weights are multiplied best
  void (*gemm)(const Gemm& gemm, const Tasks& tasks, int64_t begin, int64_t end);
  void (*epilogue)(const Epilogue& epilogue, int64_t begin, int64_t end);
  void (*dense)(const Dense& dense, int64_t begin, int64_t end);  // a task is kDenseRows rows
  void (*pairs)(const Pairs& pairs, int64_t begin, int64_t end);  // the same; null where there are no such dot products
  void (*narrow)(const Narrow& narrow);
  float (*dot)(const float* a, const float* b, int count);
  ImageKernels images;
};
constexpr int kDenseRows = 16;

/// The tasks of a GEMM for a team of this size. A sum's order does not depend on it.
Tasks gemm_tasks(const Kernels& kernels, const Gemm& gemm, int team);
inline int64_t epilogue_tasks(const Epilogue& f) {
  return int64_t{1} * f.batch * ((f.channels + f.channels_per_task - 1) / f.channels_per_task);
}
inline int64_t dense_tasks(const Dense& d) { return (d.rows + kDenseRows - 1) / kDenseRows; }
inline int64_t pairs_tasks(const Pairs& p) { return (p.rows + kDenseRows - 1) / kDenseRows; }

namespace portable {
extern const Kernels kKernels;
}
#ifdef DPA_X86
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
}
namespace avx512_fp16 {
extern const Kernels kKernels;
}
namespace amx {
extern const Kernels kKernels;
}
#endif
#ifdef DPA_ARM
namespace neon {
extern const Kernels kKernels;
}
namespace neon_bf16 {
extern const Kernels kKernels;
}
#endif

}  // namespace dpa::kernels::cpu
