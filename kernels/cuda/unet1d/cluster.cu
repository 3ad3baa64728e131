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

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/unet1d/cluster_epilogue.cuh"
#include "kernels/cuda/unet1d/cluster_gemm.cuh"

namespace dpa::kernels::unet1d {
namespace {

// Of a thread, instead of 80, in all 240: two blocks of three warpgroups share 65536.
constexpr int kGemmRegisters = 104, kEpilogueRegisters = 112, kProducerRegisters = 24;

template <class Weight, ClusterForm kForm>
__global__ void __launch_bounds__(kClusterThreads, 2) cluster_kernel(const __grid_constant__ ClusterArguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it: see sample.cpp
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ ClusterBarriers barriers;
  __shared__ __align__(16) float2 moments[kForm == ClusterForm::kGroups ? kGroupThreads / 8 : kGroupThreads / 32];
  __shared__ __align__(16) ClusterMoments exchanged;
  const ClusterLayout& y = a.layout;
  const int tid = threadIdx.x, rank = static_cast<int>(cuda::ptx::get_sreg_cluster_ctarank()),
            cluster = blockIdx.x / kClusterBlocks;
  if (tid == 0) {
    auto init = [](uint64_t& barrier, int count) { cuda::ptx::mbarrier_init(&barrier, count); };
    for (int i = 0; i < y.stages; i++) init(barriers.full[i], 1), init(barriers.empty[i], kGroupThreads / 32);
    for (auto& barrier : barriers.sums_full) init(barrier, 1);
    for (auto& of_blocks : barriers.sums_empty)
      for (auto& barrier : of_blocks) init(barrier, 1);
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

// 16 blocks a cluster are more than are portable.
template <class Weight, ClusterForm kForm>
cudaError_t allow() {
  return cudaFuncSetAttribute(cluster_kernel<Weight, kForm>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

cudaError_t launch_cluster_kernel(DType dtype, const ClusterArguments& a, cudaStream_t stream) {
  return dispatch_among<__nv_bfloat16, __half, __nv_fp8_e4m3>(dtype, [&](auto tag) {
    return dispatch_value<0, 1, 2, 3, 4>(static_cast<int>(a.layout.form), [&](auto form) {
      using Weight = typename decltype(tag)::type;
      constexpr auto kForm = static_cast<ClusterForm>(form.value);
      if (const auto error = allow<Weight, kForm>()) return error;
      return LaunchConfig(kClusters * kClusterBlocks, kClusterThreads, stream, a.layout.shared_bytes)
          .clusters(kClusterBlocks)
          .cooperative()
          .launch(cluster_kernel<Weight, kForm>, a);
    });
  });
}

}  // namespace

bool clusters_fit(int device) {
  static OncePerDevice once;
  return once(device, [] {
           constexpr auto kForm = ClusterForm::kRounds;
           if (allow<__half, kForm>() != cudaSuccess) return 0;
           LaunchConfig all(kClusters * kClusterBlocks, kClusterThreads, nullptr, kClusterSharedBytes);
           return all.clusters(kClusterBlocks).active_clusters(cluster_kernel<__half, kForm>);
         }) >= kClusters;
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
    error = launch_cluster_kernel(plan.dtype, a, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace dpa::kernels::unet1d
