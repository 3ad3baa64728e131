// The clustered path for batches of wide networks and long horizons: cluster.cu's formula, grid, blocks and messages,
// with what cluster_batch_layout.h adds. A block takes K in passes, and a further pass's input comes while the last one
// is multiplied (cluster_batch_gemm.cuh); a thread of the epilogue finishes several pairs of times, and blocks exchange
// the moments of a group that one does not hold (cluster_batch_epilogue.cuh).
#include <algorithm>

#include "kernels/cuda/common/shared_memory.h"
#include "kernels/cuda/unet1d/cluster_batch_epilogue.cuh"
#include "kernels/cuda/unet1d/cluster_batch_gemm.cuh"

namespace dpa::kernels::unet1d {
namespace cluster_batch {
namespace {

// Of a thread, instead of 80, in all 240: two blocks of three warpgroups share 65536.
constexpr int kGemmRegisters = 120, kEpilogueRegisters = 96, kProducerRegisters = 24;

// kMaxRounds: shares of a thread of the epilogue.
template <class Weight, int kMaxRounds>
__global__ void __launch_bounds__(kClusterThreads, 2) cluster_kernel(const __grid_constant__ ClusterArguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it: see sample.cpp
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ ClusterBarriers barriers;
  __shared__ __align__(16) float2 moments[kGroupThreads / 32];
  __shared__ __align__(16) ClusterMoments exchanged;
  const ClusterLayout& y = a.layout;
  const int tid = threadIdx.x, rank = static_cast<int>(cuda::ptx::get_sreg_cluster_ctarank()),
            cluster = blockIdx.x / kClusterBlocks;
  if (tid == 0) {
    auto init = [](uint64_t& barrier, int count) { cuda::ptx::mbarrier_init(&barrier, count); };
    for (int i = 0; i < y.stages; i++) init(barriers.full[i], 1), init(barriers.empty[i], kGroupThreads / 32);
    for (auto& barrier : barriers.sums_full) init(barrier, 1);
    for (auto& barrier : barriers.sums_empty) init(barrier, 1);
    for (auto& barrier : barriers.moments_full) init(barrier, 1);
    cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
  }
  const auto* descriptors = reinterpret_cast<const uint32_t*>(y.layers);
  for (int i = tid; i < static_cast<int>((y.count + 1) * sizeof(ClusterLayer) / 4); i += kClusterThreads)
    reinterpret_cast<uint32_t*>(shared + y.descriptors)[i] = descriptors[i];
  __syncthreads();
  ptx::cluster_sync();
  const ClusterRole role(a, shared, barriers, cluster, rank);
  const int group = uniform(tid / kGroupThreads);
  if (group == 0) {
    ptx::registers_increase<kGemmRegisters>();
    ClusterGemm<Weight>(role).run();
  } else if (group == 1) {
    ptx::registers_increase<kEpilogueRegisters>();
    ClusterEpilogue<typename Tile<Weight>::Activation, kMaxRounds>(role, moments, exchanged).run();
  } else {
    ptx::registers_decrease<kProducerRegisters>();
    stream_cluster_weights(a, shared, barriers, cluster, rank, uniform(tid % kGroupThreads / 32));
  }
  __syncwarp();
  ptx::cluster_sync();  // nobody leaves while a peer may read its sums
#endif
}

cudaLaunchConfig_t configure(int shared_bytes, cudaLaunchAttribute (&attributes)[2], cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = kClusters * kClusterBlocks;
  config.blockDim = kClusterThreads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kClusterBlocks, 1, 1};
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  config.attrs = attributes;
  config.numAttrs = 2;
  return config;
}

template <class Weight, int kMaxRounds>
cudaError_t launch(const ClusterArguments& a, cudaStream_t stream) {
  const auto kernel = cluster_kernel<Weight, kMaxRounds>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error == cudaSuccess) error = allow_shared_memory(reinterpret_cast<const void*>(kernel), kClusterSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  const auto config = configure(a.layout.shared_bytes, attributes, stream);
  return cudaLaunchKernelEx(&config, kernel, a);
}

template <int kMaxRounds>
cudaError_t launch_for_weights(DType dtype, const ClusterArguments& a, cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat16: return launch<__half, kMaxRounds>(a, stream);
    case DType::kFloat8E4M3: return launch<__nv_fp8_e4m3, kMaxRounds>(a, stream);
    default: return launch<__nv_bfloat16, kMaxRounds>(a, stream);
  }
}

}  // namespace
}  // namespace cluster_batch

cudaError_t run_cluster_batch(const Plan& plan, const Call& call, const Workspace& at, cudaStream_t stream) {
  cluster_batch::ClusterArguments a = {loop_arguments(plan, call, at)};
  a.layout = cluster_batch::layout(plan, call.batch, call.horizon);
  if (!a.layout.fits) return cudaErrorInvalidConfiguration;
  a.messages = static_cast<uint8_t*>(call.workspace) + at.messages;
  for (a.first_sample = 0; a.first_sample < call.batch; a.first_sample += kChunkSamples) {
    a.samples = std::min(kChunkSamples, call.batch - a.first_sample);
    cudaError_t error = cudaMemsetAsync(a.messages, 0xFF, 2 * a.layout.message_bytes, stream);
    if (error != cudaSuccess) return error;
    constexpr int kMost = 1 << cluster_batch::kMaxRoundsLog2;
    error = a.layout.rounds_log2 > 0 ? cluster_batch::launch_for_weights<kMost>(plan.dtype, a, stream)
                                     : cluster_batch::launch_for_weights<1>(plan.dtype, a, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace dpa::kernels::unet1d
