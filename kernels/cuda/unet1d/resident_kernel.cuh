// The resident path: one kernel runs the whole loop; its blocks stay, exchange activations through L2, and stream their
// own share of the weights ahead of the work.
//
//   out[n', o] = sum_{tap, i} W[tap, i, o] value[b, t stride + first + tap, i]
//   value      = residual + FiLM(mish(group_norm(out + bias)))
//
// grid      slices_out x 8 blocks, one a multiprocessor, all present at once (a cooperative launch). Block (m, k) owns
//           in every GEMM the output channels of slice m and the input channels of GroupNorm group k; so it normalises
//           its own group alone, and residuals and skips, which are always of the same group, stay in its shared memory
// block     8 consumer warps and one producer thread that copies weights into a circular buffer of 16 KB stages, as far
//           ahead as it reaches
// thread    owns channel pairs of the group when it reads, normalises and writes the GEMM's input; how a GEMM is
//           divided among the warps: resident_solo.cuh (one sample, tuned) and resident_general.cuh (any number)
// messages  block (m, k) publishes its partial sum of every output; a reader of a value reads its 8 partial sums. The
//           lowest bit of every word is an in-band flag, the step's parity (as in NCCL's LL protocol): no other flag,
//           no fence, no barrier. It costs the last bit of a partial sum (resident_partial_sums.cuh: of one in two). A
//           word is written again one step later, when every reader is past it: a block publishes a GEMM only when its
//           inputs have arrived, and those depend on every block's GEMM but one before
#pragma once
#include "kernels/cuda/common/shared_memory.h"
#include "kernels/cuda/unet1d/resident_general.cuh"
#include "kernels/cuda/unet1d/resident_solo.cuh"

namespace dpa::kernels::unet1d {

// One thread streams the slices of every GEMM, in order, for every step.
__device__ inline void stream_weights(const Arguments& a, uint8_t* buffer, uint32_t full, uint32_t empty) {
  const ResidentLayout& y = a.layout;
  // What streams must not push the messages out of L2; a first part of the weights may stay there from step to step.
  const uint64_t pass = ptx::evict_first_policy(), keep = ptx::evict_last_policy();
  int stage = 0, phase = 1;
  for (int step = 0; step < a.steps; step++) {
    for (int i = 1; i <= y.count; i++) {
      for (int s = 0; s < y.layers[i].num_segments; s++) {
        const int bytes = y.layers[i].tiles[s] * y.tile_bytes;
        const bool some_kept = y.layers[i].weights[s] >= y.kept_begin && y.layers[i].weights[s] < y.kept_end;
        int until_kept = 0;
        const uint8_t* source = a.weights + y.layers[i].weights[s] + static_cast<int64_t>(blockIdx.x) * bytes;
        for (int at = 0; at < bytes; at += kStageBytes) {
          const int size = min(kStageBytes, bytes - at);
          ptx::barrier_wait(empty + stage * 8, phase);
          ptx::barrier_expect(full + stage * 8, size);
          ptx::copy_bulk(ptx::shared_address(buffer + stage * kStageBytes), source + at, size, full + stage * 8,
                         some_kept && until_kept == 0 ? keep : pass);
          until_kept = (until_kept ? until_kept : y.kept_every) - 1;
          if (++stage == y.stages) stage = 0, phase ^= 1;
        }
      }
    }
  }
}

// kPairs: of the one-sample kernel, or 0 for the general one. kRecord: see Solo.
template <class Weight, int kPairs, bool kRecord>
__global__ void __launch_bounds__(kBlock, 1) resident_kernel(const __grid_constant__ Arguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it: see sample.cpp
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  __shared__ volatile uint32_t zero;
  const ResidentLayout& y = a.layout;
  const int tid = threadIdx.x, m = blockIdx.x / kSlicesIn, k = blockIdx.x % kSlicesIn, width = a.channels / kSlicesIn;
  if (tid == 0) {
    zero = 0;
    for (int i = 0; i < y.stages; i++) {
      cuda::ptx::mbarrier_init(full + i, 1);
      cuda::ptx::mbarrier_init(empty + i, kConsumerWarps);
    }
    cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
  }
  auto floats_at = [&](int offset) { return reinterpret_cast<float*>(shared + offset); };
  for (int i = tid; i < a.taps * a.actions * width; i += blockDim.x)
    floats_at(y.head)[i] = a.floats[a.head.weights + i / width * a.channels + k * width + i % width];
  for (int i = tid; i < a.actions * width; i += blockDim.x) {
    floats_at(y.head_residual)[i] = a.floats[a.head.residual + i / width * a.channels + k * width + i % width];
    floats_at(y.tail)[i] = a.floats[a.tail.weights + i / width * a.channels + k * width + i % width];
  }
  for (int i = tid; i < a.batch * a.horizon * a.actions; i += blockDim.x)
    floats_at(y.sample)[i] = a.condition_mask && a.condition_mask[i] ? a.condition_data[i] : a.initial[i];
  const bool solo = kPairs > 0;
  const auto* descriptors =
      solo ? reinterpret_cast<const uint32_t*>(y.solo) : reinterpret_cast<const uint32_t*>(y.layers);
  const int words = static_cast<int>((y.count + 1) * (solo ? sizeof(SoloLayer) : sizeof(ResidentLayer)) / 4);
  for (int i = tid; i < words; i += blockDim.x) reinterpret_cast<uint32_t*>(shared + y.descriptors)[i] = descriptors[i];
  __syncthreads();
  if (tid >= kThreads) {
    ptx::registers_decrease<24>();
    if (tid == kThreads) stream_weights(a, shared + y.buffer, ptx::shared_address(full), ptx::shared_address(empty));
  } else {
    ptx::registers_increase<240>();
    const WeightPipeline view = {ptx::held(ptx::shared_address(full)), ptx::held(ptx::shared_address(empty)), y.stages,
                                 0, 0};
    const Block<Weight> block = {a,        shared, view, tid,  tid / 32,
                                 tid % 32, m,      k,    zero, ptx::held(ptx::shared_address(shared))};
    if constexpr (kPairs > 0)
      Solo<Weight, kPairs, kRecord>{{block}}.run();
    else
      General<Weight>{{block}}.run();
  }
#endif
}

template <class Weight, int kPairs, bool kRecord = false>
cudaError_t launch_pairs(const Arguments& a, cudaStream_t stream) {
  const auto kernel = resident_kernel<Weight, kPairs, kRecord>;
  if (const auto error = allow_shared_memory(reinterpret_cast<const void*>(kernel), a.layout.shared_bytes))
    return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = a.layout.blocks;
  config.blockDim = kBlock;
  config.dynamicSmemBytes = a.layout.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

// Launches the one-sample kernel that records its clocks: a unit of its own, so that it is compiled beside the others.
cudaError_t launch_recording(DType dtype, const Arguments& a, cudaStream_t stream);

}  // namespace dpa::kernels::unet1d
