// The resident path: one kernel runs the whole loop of one sample; its blocks stay, exchange activations through L2, and stream their
// own share of the weights ahead of the work.
//
//   out[n', o] = sum_{tap, i} W[tap, i, o] value[b, t stride + first + tap, i]
//   value      = residual + FiLM(mish(group_norm(out + bias)))
//
// grid      slices_out x 8 blocks, one a multiprocessor, all present at once (a cooperative launch). Block (m, k) owns
//           in every GEMM the output channels of slice m and the input channels of GroupNorm group k; so it normalises
//           its own group alone, and residuals and skips, which are always of the same group, stay in its shared memory
//           Not on Hopper and on fewer multiprocessors: a half or a quarter as many blocks, with as many more slices m
// block     8 consumer warps, and producers that copy weights into a circular buffer of stages, as far ahead as it
//           reaches: on Hopper one thread by bulk copies, elsewhere four warps by cp.async
// thread    owns channel pairs of the group when it reads, normalises and writes the GEMM's input; how a GEMM is
//           divided among the warps: resident_solo.cuh
// messages  block (m, k) publishes its partial sum of every output; a reader of a value reads its 8 partial sums. The
//           lowest bit of every word is an in-band flag, the step's parity (as in NCCL's LL protocol): no other flag,
//           no fence, no barrier. It costs the last bit of a partial sum (resident_partial_sums.cuh: of one in two). A
//           word is written again one step later, when every reader is past it: a block publishes a GEMM only when its
//           inputs have arrived, and those depend on every block's GEMM but one before
#pragma once
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/unet1d/resident_solo.cuh"

namespace dpa::kernels::unet1d {

// Where a GEMM's weights of a block lie: `merged` slices of the packed tiles, of whose rows each step along K has `run`
// bytes; in the buffer a step's rows of all slices follow one another.
struct WeightSource {
  const uint8_t* from;  // of the first slice
  uint32_t apart;       // bytes from slice to slice
  int run_log2, merged_log2;
  __device__ WeightSource(const Arguments& a, const StreamedWeights& w, int segment, int bytes) {
    const int merged = a.layout.merged_log2, m = blockIdx.x / kSlicesIn, k = blockIdx.x % kSlicesIn;
    const uint32_t slice = static_cast<uint32_t>(bytes) >> merged;
    from = a.weights + w.from[segment] + static_cast<int64_t>((m << merged) * kSlicesIn + k) * slice;
    apart = slice * kSlicesIn, merged_log2 = merged;
    run_log2 = w.row_tiles_log2 - merged + 31 - __clz(a.layout.tile_bytes);
  }
  // The byte at `offset` of the block's share.
  __device__ const uint8_t* operator()(uint32_t offset) const {
    const uint32_t run = offset >> run_log2, slice = run & ((1u << merged_log2) - 1);
    return from + (slice * apart + ((run >> merged_log2) << run_log2) + (offset & ((1u << run_log2) - 1)));
  }
};

// A stage of the buffer is filled: by a bulk copy of one thread; or by a warp's cp.async, 16 bytes a lane, whose end the
// barrier counts for each lane.
__device__ __forceinline__ void fill_stage(const WeightSource& source, int at, int size, uint32_t to, uint32_t full,
                                           uint64_t policy) {
  if constexpr (kBulk) {
    ptx::barrier_expect(full, size);
    ptx::copy_bulk(to, source.from + at, size, full, policy);
  } else {
    const int lane = threadIdx.x % 32 * 16;
    if (size == kStageBytes && source.merged_log2 == 0) {
      const uint8_t* from = source.from + at + lane;
#pragma unroll
      for (int i = 0; i < kStageBytes; i += 512) ptx::copy_async_16(to + lane + i, from + i, policy);
    } else {
#pragma unroll 4
      for (int i = lane; i < size; i += 512) ptx::copy_async_16(to + i, source(at + i), policy);
    }
    ptx::barrier_arrive_async(full);
  }
}

// The producers stream the slices of every GEMM, in order, for every step: one thread by bulk copies, or four warps, a
// stage each in turns, for a warp takes 500 clocks a stage.
__device__ inline void stream_weights(const Arguments& a, uint8_t* buffer, uint32_t full, uint32_t empty) {
  const ResidentLayout& y = a.layout;
  // What streams must not push the messages out of L2; a first part of the weights may stay there from step to step.
  const uint64_t pass = ptx::evict_first_policy(), keep = ptx::evict_last_policy();
  int stage = 0, phase = 1, turn = static_cast<int>(threadIdx.x / 32) % kProducerWarps;
  for (int step = 0; step < a.steps; step++) {
    for (int i = 1; i <= y.count; i++) {
      const StreamedWeights& w = y.weights[i];
      for (int s = 0; s < w.num_segments; s++) {
        const int bytes = w.tiles[s] * y.tile_bytes;
        const bool some_kept = w.from[s] >= y.kept_begin && w.from[s] < y.kept_end;
        int until_kept = 0;
        const WeightSource source(a, w, s, bytes);
        for (int at = 0; at < bytes; at += kStageBytes) {
          const int size = min(kStageBytes, bytes - at);
          if (kBulk || turn == 0) {
            if constexpr (kBulk) {
              ptx::barrier_wait(empty + stage * 8, phase);
              // What polls read queues behind copies under way.
              const int before = stage - y.at_once;
              ptx::barrier_wait(full + (before < 0 ? before + y.stages : before) * 8, before < 0 ? phase : phase ^ 1);
            } else {  // the consumers need the issue slots
              while (!ptx::barrier_test(empty + stage * 8, phase)) __nanosleep(40);
            }
            fill_stage(source, at, size, ptx::shared_address(buffer + stage * kStageBytes), full + stage * 8,
                       some_kept && until_kept == 0 ? keep : pass);
          }
          until_kept = (until_kept ? until_kept : y.kept_every) - 1;
          turn = (turn + kProducerWarps - 1) % kProducerWarps;
          if (++stage == y.stages) stage = 0, phase ^= 1;
        }
      }
    }
  }
}

// kPairs: channel pairs that a thread finishes, at most.
template <class Weight, int kPairs, SoloForm kForm>
__global__ void __launch_bounds__(kBlock, 1) resident_kernel(const __grid_constant__ Arguments a) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  const ResidentLayout& y = a.layout;
  const int tid = threadIdx.x, m = blockIdx.x / kSlicesIn, k = blockIdx.x % kSlicesIn, width = a.channels / kSlicesIn;
  if (tid == 0) {
    for (int i = 0; i < y.stages; i++) {
      ptx::barrier_init(full + i, kBulk ? 1 : 32);
      ptx::barrier_init(empty + i, kConsumerWarps);
    }
    if constexpr (kBulk) cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
  }
  auto floats_at = [&](int offset) { return reinterpret_cast<float*>(shared + offset); };
  for (int i = tid; i < a.taps * a.actions * width; i += blockDim.x)
    floats_at(y.head)[i] = a.floats[a.head.weights + i / width * a.channels + k * width + i % width];
  for (int i = tid; i < a.actions * width; i += blockDim.x) {
    floats_at(y.head_residual)[i] = a.floats[a.head.residual + i / width * a.channels + k * width + i % width];
    floats_at(y.tail)[i / width * (width + 1) + i % width] =
        a.floats[a.tail.weights + i / width * a.channels + k * width + i % width];
  }
  const int around = a.taps / 2 * a.actions, sample = a.horizon * a.actions;
  for (int i = tid; i < around; i += blockDim.x)  // zeros before and after the times
    floats_at(y.sample)[i - around] = floats_at(y.sample)[i + sample] = 0.0f;
  for (int i = tid; i < sample; i += blockDim.x)
    floats_at(y.sample)[i] = a.condition_mask && a.condition_mask[i] ? a.condition_data[i] : a.initial[i];
  const auto* descriptors = reinterpret_cast<const uint32_t*>(y.solo);
  const int words = static_cast<int>((y.count + 1) * sizeof(SoloLayer) / 4);
  for (int i = tid; i < words; i += blockDim.x) reinterpret_cast<uint32_t*>(shared + y.descriptors)[i] = descriptors[i];
  __syncthreads();
  if (tid >= kThreads) {
    if constexpr (kBulk) ptx::registers_decrease<24>();
    if (!kBulk || tid == kThreads)
      stream_weights(a, shared + y.buffer, ptx::shared_address(full), ptx::shared_address(empty));
  } else {
    if constexpr (kBulk) ptx::registers_increase<240>();
    // Kept on Hopper with one pair a thread: with more, which want registers for weights, it costs more than it saves.
    const auto kept = [](auto argument) {
      if constexpr (kBulk && kPairs == 1)
        return ptx::kept(argument);
      else
        return argument;
    };
    const WeightPipeline view = {ptx::held(ptx::shared_address(full)), ptx::held(ptx::shared_address(empty)),
                                 kept(y.stages), 0, 0};
    const Block<Weight> block = {a,
                                 shared,
                                 view,
                                 tid,
                                 tid / 32,
                                 tid % 32,
                                 m,
                                 k,
                                 ptx::held(ptx::shared_address(shared)),
                                 kept(a.messages),
                                 kept(y.residual),
                                 kept(y.sums)};
    Solo<Weight, kPairs, kForm>{{block}}.run();
  }
#endif
}

/// Launches the kernel for the layout's pairs, which are one of `kPairs`.
template <class Weight, SoloForm kForm, int... kPairs>
cudaError_t launch_pairs(const Arguments& a, cudaStream_t stream) {
  LaunchConfig config(a.layout.blocks, kBlock, stream, a.layout.shared_bytes);
  return dispatch_value<kPairs...>(a.layout.pairs, [&](auto pairs) {
    return config.cooperative().launch(resident_kernel<Weight, pairs.value, kForm>, a);
  });
}

template <class Weight>
cudaError_t launch_resident(const Arguments& a, cudaStream_t stream) {
  return a.layout.parts ? launch_pairs<Weight, SoloForm::kParts, 1, 2, 3, 4>(a, stream)
                        : launch_pairs<Weight, SoloForm::kPlain, 1, 2, 3, 4>(a, stream);
}

}  // namespace dpa::kernels::unet1d
