// The clustered path: one kernel runs the whole loop, for several samples or one of a wide network, on tensor cores.
//
//   out[n', o] = sum_{tap, i} W[tap, i, o] value[b, t stride + first + tap, i]
//   value      = residual + FiLM(mish(group_norm(out + bias)))
//
// grid      8 clusters of 16 blocks, all present at once (a cooperative launch); two blocks fit a multiprocessor,
//           because some GPCs have fewer than 16. cluster_layout.h divides a GEMM among them, and names the forms that
//           the kernel is compiled for
// block     a warpgroup that receives inputs and multiplies (cluster_gemm.cuh), one that runs the epilogue
//           (cluster_epilogue.cuh), and four producer warps that stream the block's weights into a circular buffer, as
//           far ahead as its stages reach (cluster_block.cuh)
// messages  inside a cluster, 16-bit partial sums, stored into the shared memory of the block that adds them up.
//           Between clusters, 16-bit outputs through L2, with an in-band flag: an unwritten word has bits that no value
//           has, so there is no other flag and no grid barrier. Steps alternate between two buffers; a word of the last
//           step is reset to unwritten when the same word of this one is written
#include <algorithm>
#include <atomic>

#include "kernels/cuda/common/shared_memory.h"
#include "kernels/cuda/unet1d/cluster_epilogue.cuh"
#include "kernels/cuda/unet1d/cluster_gemm.cuh"

namespace dpa::kernels::unet1d {
namespace {

// Of a thread, instead of 80, in all 240: two blocks of three warpgroups share 65536.
constexpr int kGemmRegisters = 120, kEpilogueRegisters = 96, kProducerRegisters = 24;

template <class Weight, ClusterForm kForm>
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
    ClusterGemm<Weight, kForm>(role).run();
  } else if (group == 1) {
    ptx::registers_increase<kEpilogueRegisters>();
    ClusterEpilogue<typename Tile<Weight>::Activation, kForm>(role, moments, exchanged).run();
  } else {
    ptx::registers_decrease<kProducerRegisters>();
    stream_cluster_weights<kForm>(a, shared, barriers, cluster, rank, uniform(tid % kGroupThreads / 32));
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

template <class Weight, ClusterForm kForm>
cudaError_t allow() {
  const auto kernel = cluster_kernel<Weight, kForm>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  return allow_shared_memory(reinterpret_cast<const void*>(kernel), kClusterSharedBytes);
}

template <class Weight, ClusterForm kForm>
cudaError_t launch_cluster_kernel(const ClusterArguments& a, cudaStream_t stream) {
  const cudaError_t error = allow<Weight, kForm>();
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  const auto config = configure(a.layout.shared_bytes, attributes, stream);
  return cudaLaunchKernelEx(&config, cluster_kernel<Weight, kForm>, a);
}

template <class Weight>
cudaError_t launch_form(const ClusterArguments& a, cudaStream_t stream) {
  switch (a.layout.form) {
    case ClusterForm::kAlone: return launch_cluster_kernel<Weight, ClusterForm::kAlone>(a, stream);
    case ClusterForm::kWhole: return launch_cluster_kernel<Weight, ClusterForm::kWhole>(a, stream);
    case ClusterForm::kPasses: return launch_cluster_kernel<Weight, ClusterForm::kPasses>(a, stream);
    default: return launch_cluster_kernel<Weight, ClusterForm::kRounds>(a, stream);
  }
}

cudaError_t launch_for_weights(DType dtype, const ClusterArguments& a, cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat16: return launch_form<__half>(a, stream);
    case DType::kFloat8E4M3: return launch_form<__nv_fp8_e4m3>(a, stream);
    default: return launch_form<__nv_bfloat16>(a, stream);
  }
}

bool query_clusters_fit(int device) {
  int current = 0, clusters = 0;
  if (cudaGetDevice(&current) != cudaSuccess || current != device ||
      allow<__half, ClusterForm::kRounds>() != cudaSuccess)
    return false;
  cudaLaunchAttribute attributes[2];
  auto config = configure(kClusterSharedBytes, attributes, nullptr);
  config.numAttrs = 1;
  if (cudaOccupancyMaxActiveClusters(&clusters, cluster_kernel<__half, ClusterForm::kRounds>, &config) != cudaSuccess) {
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
  if (answers[device] == 0) answers[device] = query_clusters_fit(device) ? 1 : 2;
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
    error = launch_for_weights(plan.dtype, a, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace dpa::kernels::unet1d
