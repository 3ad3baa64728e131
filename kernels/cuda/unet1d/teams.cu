// The loop in teams: the whole denoising loop of a narrow network in one kernel, 8 blocks for some samples.
//
// Dimensions: a network is a list of phases (kernels/plans/unet1d/teams.h), one a convolution.
//   grid    teams x 8 blocks, all resident. Block r of a team owns, in every convolution, the r-th eighth of the output
//           channels: whole GroupNorm groups, over all input channels. So it alone adds up, normalises and activates
//           them, and hands finished values over, once a convolution; residuals stay in its threads' registers
//   block   8 warps over the row tiles of 16 channels and K, whose sums meet in shared memory; 4 of the epilogue, which
//           fetch a phase's parameters while the others multiply
//   warp    that multiplies: its own stream of weights through shared memory, which runs ahead over phases and steps
//
// Teams share nothing. A team on compute capability 9.0 is a cluster: values are stored into the slabs of all eight
// blocks, where the next GEMM reads them. Elsewhere, and where clusters do not fit, they are words in L2 with the step's
// parity as their flag. A phase is all-to-all in its team, so no block is more than one hand-over ahead of another.
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/unet1d/paths.h"
#include "kernels/cuda/unet1d/teams_kernel.cuh"

namespace dpa::kernels::unet1d {
namespace {

template <class Tile, bool kCluster>
__global__ void __launch_bounds__(kTeamThreads, 1) team_kernel(const __grid_constant__ TeamArguments a) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster) device::run_team<Tile, device::ClusterHandover>(a);
#endif
#if __CUDA_ARCH__ >= 800
  if constexpr (!kCluster) device::run_team<Tile, device::WordHandover>(a);
#endif
}

// Blocks of a cluster are placed together, and clusters do not wait for each other.
template <class Tile, bool kCluster>
cudaError_t launch_team_kernel(const TeamArguments& a, int teams, cudaStream_t stream) {
  return LaunchConfig(teams * kTeamBlocks, kTeamThreads, stream, a.shared.bytes)
      .cooperative(!kCluster)
      .clusters(kCluster ? kTeamBlocks : 0)
      .launch(team_kernel<Tile, kCluster>, a);
}
template <class Tile>
cudaError_t launch_tile(const TeamArguments& a, int teams, bool cluster, cudaStream_t stream) {
  return cluster ? launch_team_kernel<Tile, true>(a, teams, stream) : launch_team_kernel<Tile, false>(a, teams, stream);
}

cudaError_t launch_teams(DType dtype, const TeamArguments& a, const TeamPlan& plan, bool cluster, cudaStream_t stream) {
  switch (dtype) {
    case DType::kBFloat16: return launch_tile<device::TileBf16>(a, plan.teams, cluster, stream);
    case DType::kFloat16: return launch_tile<device::TileFp16>(a, plan.teams, cluster, stream);
    default: return launch_tile<device::TileFp32>(a, plan.teams, cluster, stream);
  }
}

}  // namespace

int team_clusters(int device) {
  static OncePerDevice once;
  return once(device, [&] {
    const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    LaunchConfig one(kTeamBlocks, kTeamThreads, nullptr, bytes - kTeamStatic);
    return one.clusters(kTeamBlocks).active_clusters(team_kernel<device::TileBf16, true>);
  });
}

cudaError_t run_teams(const Plan& plan, const Call& call, const Workspace& at, const Device& device,
                      cudaStream_t stream) {
  const TeamCall cut = team_call(plan, call.batch, call.horizon, device);
  const int samples = cut.samples;
  if (samples < 1) return cudaErrorInvalidConfiguration;
  auto* workspace = static_cast<uint8_t*>(call.workspace) + at.messages;
  const LoopArguments all = loop_arguments(plan, call, at);
  for (int first = 0; first < call.batch; first += samples) {
    TeamArguments part = {loop_part(all, first, std::min(samples, call.batch - first))};
    part.noise_stride = int64_t{call.batch} * call.horizon * all.actions;
    const TeamPlan teams = make_teams(plan, part.batch, call.horizon, cut.teams, device.shared_bytes);
    set_teams(part, plan, teams, workspace);
    const size_t words = kTeamFirstWord + static_cast<size_t>(teams.teams) * teams.words;
    cudaError_t error = cudaMemsetAsync(workspace, 0, words * sizeof(uint32_t), stream);
    if (error == cudaSuccess) error = launch_teams(plan.dtype, part, teams, cut.clusters, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace dpa::kernels::unet1d
