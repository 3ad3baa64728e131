// What the arithmetic warps of the resident kernel begin with: the arguments, the circular buffer of weights, and
// the two ends of a step, which know the sample itself.
#pragma once
#include <cuda_runtime.h>

#include "kernels/cuda/common/ptx_copy.cuh"
#include "kernels/cuda/unet1d/loop.cuh"
#include "kernels/cuda/unet1d/paths.h"
#include "kernels/cuda/unet1d/tile.cuh"
#include "kernels/math/diffusion_step.h"
#include "kernels/math/mish.h"
#include "kernels/plans/unet1d/resident_layout.h"

namespace dpa::kernels::unet1d {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kBulk = true;  // weights come by bulk copies, through shared memory
#else
constexpr bool kBulk = false;
#endif
constexpr int kThreads = kConsumerWarps * 32, kBlock = kThreads + (kBulk ? kProducerWarps * 32 : 0);

/// What the kernel is compiled for: norms whose slice is one group (ResidentLayout::parts); all norms; and all of them, where
/// the clocks of the last step go to Arguments::record.
enum class SoloForm { kPlain, kParts, kRecord };

struct Arguments : LoopArguments {
  ResidentLayout layout;
  int channels;
  uint32_t* messages;
  uint32_t* record;  // see Call
};
/// Launches the kernel. A source for each type of weights and form: a driver that compiles PTX compiles a source at a
/// time, and needs one of them.
template <class Weight, SoloForm kForm>
cudaError_t launch_resident(const Arguments& a, cudaStream_t stream);
/// The kernel that records its clocks.
cudaError_t launch_recording(DType dtype, const Arguments& a, cudaStream_t stream);

// The circular buffer as the arithmetic warps see it.
struct WeightPipeline {
  uint32_t full, empty;  // barriers of stage 0
  int stages, stage, phase;
  __device__ __forceinline__ void wait_ahead(int n) const {
    int s = stage + n, p = phase;
    if (s >= stages) s -= stages, p ^= 1;
    ptx::barrier_wait(full + s * 8, p);
  }
  // Goes past the next `count` stages, and returns the barrier at which lane i gives back the i-th of them, if it is one,
  // by an arrival when the whole warp has read them.
  __device__ __forceinline__ uint32_t take(int lane, int count) {
    const int s = stage + lane;
    const uint32_t barrier = empty + (s >= stages ? s - stages : s) * 8;
    stage += count;
    if (stage >= stages) stage -= stages, phase ^= 1;
    return barrier;
  }
  // Gives back the next `count` stages. The whole warp calls, when it has read them.
  __device__ __forceinline__ void release(int lane, int count) {
    __syncwarp();
    const uint32_t barrier = take(lane, count);
    if (lane < count) ptx::barrier_arrive(barrier);
  }
};

__device__ __forceinline__ void sync_consumers() { ptx::sync_threads(1, kThreads); }

template <class Weight>
struct Block {
  using Math = Tile<Weight>;
  static constexpr bool kWide = sizeof(Weight) == 4;

  const Arguments& a;
  uint8_t* shared;
  WeightPipeline pipeline;
  int tid, warp, lane, m, k;
  uint32_t base;             // of `shared`, as an address
  uint32_t* messages;        // the arguments'
  int residual_at, sums_at;  // the layout's
  int step = 0;
  uint32_t phase = 1;
  __device__ __forceinline__ float* floats_at(int offset) const { return reinterpret_cast<float*>(shared + offset); }

  // The first convolution's output, for all of a thread's pairs, which are of the same channels, and its residual's,
  // from the sample itself. Taps and actions are one axis, in the weights as in the sample, which has zeros around it.
  template <int kPairs>
  __device__ __forceinline__ void first_conv(float2 (&sum)[kPairs], float2 bias, float2 other_bias, int width, int t,
                                             int times_apart, int c, int count) const {
    float2 other[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; i++) sum[i] = bias, other[i] = other_bias;
    const int actions = static_cast<int>(ptx::held(a.actions)), apart = times_apart * actions;
    // kAtOnce values of the sample are one load.
    auto add = [&](auto at_once, float2(&to)[kPairs], const float* weights, const float* values, int n) {
      constexpr int kAtOnce = decltype(at_once)::value;
#pragma unroll(kPairs > 2 ? 4 : 2)
      for (int at = 0; at < n; at += kAtOnce) {
        float x[kPairs][kAtOnce];
#pragma unroll
        for (int i = 0; i < kPairs; i++) {
          if constexpr (kAtOnce == 2) {
            const float2 two = *reinterpret_cast<const float2*>(values + i * apart + at);
            x[i][0] = two.x, x[i][1] = two.y;
          } else {
            x[i][0] = values[i * apart + at];
          }
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
          const float2 w = *reinterpret_cast<const float2*>(weights + (at + j) * width + c);
#pragma unroll
          for (int i = 0; i < kPairs; i++)
            to[i] = make_float2(fmaf(w.x, x[i][j], to[i].x), fmaf(w.y, x[i][j], to[i].y));
        }
      }
    };
    auto both = [&](auto at_once) {
      const float* x = floats_at(a.layout.sample) + t * actions;
      add(at_once, sum, floats_at(a.layout.head), x - a.taps / 2 * actions, a.taps * actions);
      add(at_once, other, floats_at(a.layout.head_residual), x, actions);
    };
    if (count > 0) {  // of the last of a thread's pairs some may lie behind the times: what is read there is not used
      if (actions % 2 == 0)
        both(std::integral_constant<int, 2>());
      else
        both(std::integral_constant<int, 1>());
    }
    if (a.local) {
      const int channels = width * kSlicesIn;
      const float* from = a.local + step * a.local_step + t * channels + k * width + c;
#pragma unroll
      for (int i = 0; i < kPairs; i++) {
        if (i >= count) continue;
        const float2 f = *reinterpret_cast<const float2*>(from + i * times_apart * channels);
        other[i].x += f.x, other[i].y += f.y;
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      if (i < count)
        reinterpret_cast<float2*>(shared + a.layout.residual)[tid + i * kThreads] = other[i];
      else
        sum[i] = make_float2(0.0f, 0.0f);
    }
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
    } else {
#pragma unroll
      for (int i = 0; i + 1 < Columns; i += 2) {
        uint32_t words[4];
        ptx::load_matrix_x4(words, rows[i] + offset);
        b[i].v[0] = words[0], b[i].v[1] = words[1], b[i + 1].v[0] = words[2], b[i + 1].v[1] = words[3];
      }
      if constexpr (Columns % 2) ptx::load_matrix_x2(b[Columns - 1].v, rows[Columns - 1] + offset);
    }
  }

  // Actions from the last GEMM's output: partial sums over this group's channels, exchanged among the 8 blocks of
  // slice m, then the scheduler's step. Every block keeps the sample, and computes the same one.
  __device__ __forceinline__ void tail() const {
    // Held: what follows of it is not computed before the loop over steps, where registers are short.
    const int actions = static_cast<int>(ptx::held(a.actions)), words = a.horizon * actions;
    uint32_t* to = messages + (a.layout.tail_message + static_cast<uint32_t>(m * kSlicesIn * words));
    const float* noise = a.noise ? a.noise + static_cast<int64_t>(step) * words : nullptr;
    // What the scheduler's step takes comes from far away. Without a table the row is not used.
    if (noise) {
      for (int i = tid; i < words; i += kThreads) ptx::prefetch(noise + i);
    }
    const math::SchedulerStep<float> rule(a.table ? a.table : a.floats, step, a.clip, noise != nullptr);
    constexpr int kFewWords = 64;
    if (words <= kFewWords)
      send_actions<8>(to + k * words, words, actions);
    else
      send_actions<1>(to + k * words, words, actions);
    inject_test_delay();
    constexpr int kRounds = 3;  // words of a thread that are polled at once
#pragma unroll 1
    for (int first = tid; first < words; first += kRounds * kThreads) {
      float bias[kRounds], random[kRounds];
#pragma unroll
      for (int r = 0; r < kRounds; r++) {
        const int i = first + r * kThreads;
        bias[r] = i < words ? a.floats[a.tail.bias + i % actions] : 0.0f;
        random[r] = noise && i < words ? noise[i] : 0.0f;
      }
      uint32_t word[kRounds][kSlicesIn], wrong;
      do {
        wrong = 0;
#pragma unroll
        for (int r = 0; r < kRounds; r++) {
#pragma unroll
          for (int s = 0; s < kSlicesIn; s++)
            word[r][s] = first + r * kThreads < words
                             ? ptx::load_message_word<void>(to + (s * words + first + r * kThreads))
                             : phase;
        }
#pragma unroll
        for (int r = 0; r < kRounds; r++) {
#pragma unroll
          for (int s = 0; s < kSlicesIn; s++) wrong |= word[r][s] ^ phase;
        }
      } while (wrong & 1);
#pragma unroll
      for (int r = 0; r < kRounds; r++) {
        if (first + r * kThreads < words) advance(first + r * kThreads, word[r], bias[r], random[r], rule);
      }
    }
    sync_consumers();
  }

  // This group's part of every action; kLanes lanes share one.
  template <int kLanes>
  __device__ __forceinline__ void send_actions(uint32_t* to, int words, int actions) const {
    const int width = a.channels / kSlicesIn, part = tid % kLanes;
    const float *values = floats_at(a.layout.stash), *weights = floats_at(a.layout.tail);
    for (int first = 0; first < words; first += kThreads / kLanes) {
      const int i = first + tid / kLanes, t = i / actions;
      float sum = 0.0f;
      if (i < words) {
        const float *row = values + t * width, *weight = weights + (i - t * actions) * (width + 1);
#pragma unroll 4
        for (int c = part; c < width; c += kLanes) sum = fmaf(row[c], weight[c], sum);
      }
#pragma unroll
      for (int s = kLanes / 2; s; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
      if (i < words && part == 0) ptx::store_message_word<void>(to + i, (__float_as_uint(sum) & ~1u) | phase);
    }
  }
  // The scheduler's step of number i of the sample, from the 8 groups' parts of the network's output.
  __device__ __forceinline__ void advance(int i, const uint32_t (&word)[kSlicesIn], float output, float noise,
                                          const math::SchedulerStep<float>& rule) const {
#pragma unroll
    for (int s = 0; s < kSlicesIn; s++) output += __uint_as_float(word[s]);
    if (a.table) {
      float* x = floats_at(a.layout.sample) + i;
      *x = output = with_condition(a, rule.step(output, *x, noise), i);
    }
    if (step + 1 == a.steps && blockIdx.x == 0) a.output[i] = output;
  }
};

}  // namespace dpa::kernels::unet1d
