// The resident path: one kernel runs the whole loop of one sample; its blocks stay, exchange activations through L2, and read their
// own share of the weights ahead of the work.
//
//   out[n', o] = sum_{tap, i} W[tap, i, o] value[b, t stride + first + tap, i]
//   value      = residual + FiLM(mish(group_norm(out + bias)))
//
// grid      slices_out x 8 blocks, one a multiprocessor, all present at once (a cooperative launch). Block (m, k) owns
//           in every GEMM the output channels of slice m and the input channels of GroupNorm group k; so it normalises
//           its own group alone, and residuals and skips, which are always of the same group, stay in its shared memory
//           Not on Hopper and on fewer multiprocessors: a half or a quarter as many blocks, with as many more slices m
// block     8 arithmetic warps. On Hopper a further thread copies weights into a circular buffer of stages, by bulk copies, as
//           far ahead as it reaches; elsewhere a warp loads its weights of the next GEMM to registers
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

// On Hopper one thread streams the slices of every GEMM, in order, for every step.
__device__ inline void stream_weights(const Arguments& a, uint8_t* buffer, uint32_t full, uint32_t empty) {
  const ResidentLayout& y = a.layout;
  // What streams must not push the messages out of L2; a first part of the weights may stay there from step to step.
  const uint64_t pass = ptx::evict_first_policy(), keep = ptx::evict_last_policy();
  int stage = 0, phase = 1;
  for (int step = 0; step < a.steps; step++) {
    for (int i = 1; i <= y.count; i++) {
      const StreamedWeights& w = y.weights[i];
      for (int s = 0; s < w.num_segments; s++) {
        const int bytes = w.tiles[s] * y.tile_bytes;
        const bool some_kept = w.from[s] >= y.kept_begin && w.from[s] < y.kept_end;
        int until_kept = 0;
        const uint8_t* from = a.weights + w.from[s] + static_cast<int64_t>(blockIdx.x) * bytes;
        for (int at = 0; at < bytes; at += kStageBytes) {
          const int size = min(kStageBytes, bytes - at);
          ptx::barrier_wait(empty + stage * 8, phase);
          // What polls read queues behind copies under way.
          const int before = stage - y.at_once;
          ptx::barrier_wait(full + (before < 0 ? before + y.stages : before) * 8, before < 0 ? phase : phase ^ 1);
          ptx::barrier_expect(full + stage * 8, size);
          ptx::copy_bulk(ptx::shared_address(buffer + stage * kStageBytes), from + at, size, full + stage * 8,
                         some_kept && until_kept == 0 ? keep : pass);
          until_kept = (until_kept ? until_kept : y.kept_every) - 1;
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
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];  // on Hopper
  const ResidentLayout& y = a.layout;
  const int tid = threadIdx.x, m = blockIdx.x / kSlicesIn, k = blockIdx.x % kSlicesIn, width = a.channels / kSlicesIn;
  if constexpr (kBulk) {
    if (tid == 0) {
      for (int i = 0; i < y.stages; i++) {
        ptx::barrier_init(full + i, 1);
        ptx::barrier_init(empty + i, kConsumerWarps);
      }
      cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
    }
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
    if constexpr (kBulk) {
      ptx::registers_decrease<24>();
      if (tid == kThreads) stream_weights(a, shared + y.buffer, ptx::shared_address(full), ptx::shared_address(empty));
    }
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
  LaunchConfig config(a.layout.blocks, a.layout.threads, stream, a.layout.shared_bytes);
  return dispatch_value<kPairs...>(a.layout.pairs, [&](auto pairs) {
    return config.cooperative().launch(resident_kernel<Weight, pairs.value, kForm>, a);
  });
}

template <class Weight, SoloForm kForm>
cudaError_t launch_resident(const Arguments& a, cudaStream_t stream) {
  return launch_pairs<Weight, kForm, 1, 2, 3, 4>(a, stream);
}

}  // namespace dpa::kernels::unet1d
