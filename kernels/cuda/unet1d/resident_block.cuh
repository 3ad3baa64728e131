// What both kinds of arithmetic warps of the resident kernel share: the arguments, the circular buffer of weights, and
// the two ends of a step, which know the sample itself.
#pragma once
#include <cuda_runtime.h>

#include "kernels/cuda/unet1d/loop.cuh"
#include "kernels/cuda/unet1d/paths.h"
#include "kernels/cuda/unet1d/tile.cuh"
#include "kernels/math/diffusion_step.h"
#include "kernels/math/mish.h"
#include "kernels/plans/unet1d/resident_layout.h"

namespace dpa::kernels::unet1d {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kBulk = true;  // weights come by bulk copies, not by cp.async
#else
constexpr bool kBulk = false;
#endif
constexpr int kThreads = kConsumerWarps * 32, kBlock = kThreads + kProducerWarps * 32;
constexpr int kStageBytes = kBulk ? kBulkStageBytes : kAsyncStageBytes;

struct Arguments : LoopArguments {
  ResidentLayout layout;
  int channels;
  uint32_t* messages;
  uint32_t* record;  // see Call
};

// The circular buffer as the arithmetic warps see it.
struct WeightPipeline {
  uint32_t full, empty;  // barriers of stage 0
  int stages, stage, phase;
  __device__ __forceinline__ void wait_ahead(int n) const {
    int s = stage + n, p = phase;
    if (s >= stages) s -= stages, p ^= 1;
    ptx::barrier_wait(full + s * 8, p);
  }
  // Gives back the next `count` stages: lane i the i-th of them. The whole warp calls, when it has read them.
  __device__ __forceinline__ void release(int lane, int count) {
    __syncwarp();
    if (lane < count) {
      const int s = stage + lane;
      ptx::barrier_arrive(empty + (s >= stages ? s - stages : s) * 8);
    }
    stage += count;
    if (stage >= stages) stage -= stages, phase ^= 1;
  }
  __device__ __forceinline__ void release(int lane) {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(empty + stage * 8);
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

__device__ __forceinline__ void sync_consumers() { ptx::sync_threads(1, kThreads); }

template <class Weight>
struct Block {
  using Math = Tile<Weight>;
  static constexpr bool kWide = sizeof(Weight) == 4;
  static constexpr int kTilesPerStage = kStageBytes / Math::kBytes;

  const Arguments& a;
  uint8_t* shared;
  WeightPipeline pipeline;
  int tid, warp, lane, m, k;
  uint32_t zero;  // 0, but not to the compiler: keeps addresses from being folded into one another
  uint32_t base;  // of `shared`, as an address
  int step = 0;
  uint32_t phase = 1;
  __device__ __forceinline__ float* floats_at(int offset) const { return reinterpret_cast<float*>(shared + offset); }

  __device__ __forceinline__ static float activate(float x) {
    if constexpr (kWide)
      return math::mish(x);
    else
      return quick_mish(x);
  }

  // A pair of the first convolution's output, and of its residual's, from the sample itself.
  __device__ __forceinline__ float2 first_conv(float2 bias, float2 other_bias, int width, int b, int t, int c,
                                               int unit) const {
    const float* x = floats_at(a.layout.sample) + b * a.horizon * a.actions;
    float2 sum = bias, other = other_bias;
    auto add = [&](float2& to, const float* weights, const float* values, int begin, int end) {
#pragma unroll 5
      for (int i = begin; i < end; i++) {
        const float2 weight = *reinterpret_cast<const float2*>(weights + i * width + c);
        to = make_float2(fmaf(weight.x, values[i], to.x), fmaf(weight.y, values[i], to.y));
      }
    };
    // Taps and actions are one axis, in the weights as in the sample.
    const int before = t - a.taps / 2;
    add(sum, floats_at(a.layout.head), x + before * a.actions, max(-before, 0) * a.actions,
        min(a.horizon - before, a.taps) * a.actions);
    add(other, floats_at(a.layout.head_residual), x + t * a.actions, 0, a.actions);
    reinterpret_cast<float2*>(shared + a.layout.residual)[unit] = other;
    return sum;
  }

  // Where this lane's 16 bytes of a step begin in its column's row: of float32 the low halves are elsewhere.
  __device__ __forceinline__ int lane_part() const {
    return (lane >> 3 & 1) * 16 + (kWide && lane & 16 ? a.layout.input_low - a.layout.input : 0);
  }
  // A pair of the GEMM's input, at a byte offset in shared memory.
  __device__ __forceinline__ void write_input(int at, float2 v) const {
    uint32_t* to = reinterpret_cast<uint32_t*>(shared + at);
    if constexpr (kWide)
      Math::split(v.x, v.y, *to, to[(a.layout.input_low - a.layout.input) / 4]);
    else
      *to = pack_pair<typename Math::Activation>(v.x, v.y);
  }

  // Loads the GEMMs' activations of step `offset` for this warp's column tiles.
  template <int Columns>
  __device__ __forceinline__ void load_columns(typename Math::B (&b)[Columns], const uint32_t (&rows)[Columns],
                                               uint32_t offset) const {
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < Columns; i++) ptx::load_matrix_x4(b[i].v, rows[i] + offset);
    } else if constexpr (Columns == 1) {
      ptx::load_matrix_x2(b[0].v, rows[0] + offset);
    } else {
#pragma unroll
      for (int i = 0; i < Columns; i += 2) {
        uint32_t words[4];
        ptx::load_matrix_x4(words, rows[i] + offset);
        b[i].v[0] = words[0], b[i].v[1] = words[1], b[i + 1].v[0] = words[2], b[i + 1].v[1] = words[3];
      }
    }
  }

  __device__ __forceinline__ float with_condition(float x, int i) const {
    return a.condition_mask && a.condition_mask[i] ? a.condition_data[i] : x;
  }

  // Actions from the last GEMM's output: partial sums over this group's channels, exchanged among the 8 blocks of
  // slice m, then the scheduler's step. Every block keeps the sample, and computes the same one.
  __device__ __forceinline__ void tail(int batch) {
    const int width = a.channels / kSlicesIn, pairs = a.horizon * width / 2,
              stride = (pairs + kThreads - 1) / kThreads * kThreads;
    const float2* values = reinterpret_cast<const float2*>(shared + a.layout.stash);
    const int words = batch * a.horizon * a.actions, per_sample = a.horizon * a.actions;
    const float* weights = floats_at(a.layout.tail);
    uint32_t* messages = a.messages + a.layout.tail_message + static_cast<int64_t>(m) * kSlicesIn * words;
    // What the scheduler's step takes comes from far away.
    if (a.noise && tid < words) ptx::prefetch(a.noise + static_cast<int64_t>(step) * words + tid);
    if (a.table && tid < words) ptx::prefetch(a.table + step * math::SchedulerStep<float>::kColumns);
    for (int base = 0; base < words; base += kThreads / 8) {
      const int i = base + tid / 8, b = batch == 1 ? 0 : i / per_sample, t = (i - b * per_sample) / a.actions,
                d = i - (b * a.horizon + t) * a.actions;
      float sum = 0.0f;
      if (i < words) {
        const float* row = reinterpret_cast<const float*>(values + b * stride) + t * width;
        for (int c = tid % 8; c < width; c += 8) sum = fmaf(row[c], weights[d * width + c], sum);
      }
#pragma unroll
      for (int s = 4; s; s >>= 1) sum += __shfl_xor_sync(~0u, sum, s);
      if (i < words && tid % 8 == 0)
        ptx::store_message_word(messages + static_cast<int64_t>(k) * words + i, (__float_as_uint(sum) & ~1u) | phase);
    }
    inject_test_delay();
    float* x = floats_at(a.layout.sample);
    const bool last = step + 1 == a.steps;
    for (int i = tid; i < words; i += kThreads) {
      const float noise = a.noise ? a.noise[static_cast<int64_t>(step) * words + i] : 0.0f;
      uint32_t word[kSlicesIn], wrong;
      do {
        wrong = 0;
#pragma unroll
        for (int s = 0; s < kSlicesIn; s++)
          word[s] = ptx::load_message_word(messages + static_cast<int64_t>(s) * words + i);
#pragma unroll
        for (int s = 0; s < kSlicesIn; s++) wrong |= word[s] ^ phase;
      } while (wrong & 1);
      float output = a.floats[a.tail.bias + i % a.actions];
#pragma unroll
      for (int s = 0; s < kSlicesIn; s++) output += __uint_as_float(word[s]);
      if (a.table) {
        const math::SchedulerStep<float> rule(a.table, step, a.clip, a.noise != nullptr);
        output = with_condition(rule.step(output, x[i], noise), i);
        x[i] = output;
      }
      if (last && blockIdx.x == 0) a.output[i] = output;
    }
    sync_consumers();
  }
};

}  // namespace dpa::kernels::unet1d
