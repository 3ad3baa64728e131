// The clustered path: one kernel runs the whole loop for several samples, on tensor cores.
//
//   out[n', o] = residual + FiLM(mish(group_norm(sum_{tap, i} W[tap, i, o] value[b, t stride + first + tap, i] +
//   bias)))
//
// Grid: 8 clusters of 16 blocks, all present at once (a cooperative launch); two blocks fit a multiprocessor, because
//   some GPCs have fewer than 16. cluster.h says how a product is divided among them.
// Block: a warpgroup that receives and multiplies (cluster_product.cuh), one that finishes outputs
// (cluster_finish.cuh),
//   and a warp that streams the block's weights into a ring, as far ahead as the ring reaches (cluster_block.cuh).
// Hand-over: inside a cluster, partial sums in 16 bits, stored into the shared memory of the block that finishes them.
// Between clusters, outputs in 16 bits,
//   through L2, as words that say themselves whether they have been written: an unwritten one has bits that no value
//   has. So there is no flag and no grid barrier. Steps take turns with two buffers; a word of the last step is made
//   unwritten again when the same word of this one is written.
#include <algorithm>
#include <atomic>

#include "kernels/cuda/common/shared_memory.h"
#include "kernels/cuda/unet1d/cluster_epilogue.cuh"
#include "kernels/cuda/unet1d/cluster_gemm.cuh"

namespace dpa::kernels::unet1d {
namespace {

// Of a thread, instead of 80: two blocks of three warpgroups share 65536.
constexpr int kProductRegisters = 112, kFinishRegisters = 96, kCopyRegisters = 32;

template <class T>
__global__ void __launch_bounds__(kClusterThreads, 2) cluster_kernel(const __grid_constant__ ClusterArguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it: see sample.cpp
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ ClusterBarriers barriers;
  __shared__ __align__(16) float2 moments[kGroupThreads / 32];
  const ClusterLayout& y = a.layout;
  const int tid = threadIdx.x, rank = ptx::cluster_rank(), cluster = blockIdx.x / kClusterBlocks;
  if (tid == 0) {
    auto init = [](uint64_t& barrier, int count) { ptx::barrier_init(ptx::shared_address(&barrier), count); };
    for (int i = 0; i < y.stages; i++) init(barriers.full[i], 1), init(barriers.empty[i], kGroupThreads / 32);
    for (auto& barrier : barriers.sums) init(barrier, 1);
    for (auto& barrier : barriers.taken) init(barrier, 1);
    ptx::barrier_init_fence();
  }
  const auto* descriptors = reinterpret_cast<const uint32_t*>(y.layers);
  for (int i = tid; i < static_cast<int>((y.count + 1) * sizeof(ClusterLayer) / 4); i += kClusterThreads)
    reinterpret_cast<uint32_t*>(shared + y.descriptors)[i] = descriptors[i];
  __syncthreads();
  ptx::cluster_sync();
  const ClusterRole role(a, shared, barriers, cluster, rank);
  const int group = uniform(tid / kGroupThreads);
  if (group == 0) {
    ptx::registers_increase<kProductRegisters>();
    ClusterProduct<T>(role).run();
  } else if (group == 1) {
    ptx::registers_increase<kFinishRegisters>();
    ClusterFinish<T>(role, moments).run();
  } else {
    ptx::registers_decrease<kCopyRegisters>();
    if (uniform(tid / 32) == 2 * kGroupThreads / 32) stream_cluster_weights(a, shared, barriers, cluster, rank);
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

template <class T>
cudaError_t allow() {
  const cudaError_t error = cudaFuncSetAttribute(cluster_kernel<T>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  return allow_shared_memory(reinterpret_cast<const void*>(cluster_kernel<T>), kClusterSharedBytes);
}

template <class T>
cudaError_t launch_cluster(const ClusterArguments& a, cudaStream_t stream) {
  const cudaError_t error = allow<T>();
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  const auto config = configure(a.layout.shared_bytes, attributes, stream);
  return cudaLaunchKernelEx(&config, cluster_kernel<T>, a);
}

bool ask(int device) {
  int current = 0, clusters = 0;
  if (cudaGetDevice(&current) != cudaSuccess || current != device || allow<__half>() != cudaSuccess) return false;
  cudaLaunchAttribute attributes[2];
  auto config = configure(kClusterSharedBytes, attributes, nullptr);
  config.numAttrs = 1;
  if (cudaOccupancyMaxActiveClusters(&clusters, cluster_kernel<__half>, &config) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return clusters >= kClusters;
}

}  // namespace

bool clusters_fit(int device) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> answers[kMaxDevices];  // 0: not asked
  if (device < 0 || device >= kMaxDevices) return false;
  if (answers[device] == 0) answers[device] = ask(device) ? 1 : 2;
  return answers[device] == 1;
}

cudaError_t run_clustered(const Plan& plan, const Call& call, const Workspace& at, cudaStream_t stream) {
  ClusterArguments a = {loop_arguments(plan, call, at)};
  a.layout = cluster_layout(plan, call.batch, call.horizon);
  if (!a.layout.fits) return cudaErrorInvalidConfiguration;
  a.messages = static_cast<uint8_t*>(call.workspace) + at.messages;
  for (a.first_sample = 0; a.first_sample < call.batch; a.first_sample += kChunkSamples) {
    a.samples = std::min(kChunkSamples, call.batch - a.first_sample);
    cudaError_t error = cudaMemsetAsync(a.messages, 0xFF, 2 * a.layout.message_bytes, stream);
    if (error != cudaSuccess) return error;
    error =
        plan.dtype == DType::kFloat16 ? launch_cluster<__half>(a, stream) : launch_cluster<__nv_bfloat16>(a, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace dpa::kernels::unet1d
