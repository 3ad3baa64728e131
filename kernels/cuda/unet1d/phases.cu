// The loop in phases: the whole denoising loop in one persistent kernel, for compute capability 8.0 and later, any
// number of multiprocessors, any sizes of the family.
//
// Dimensions: a network is a list of phases (kernels/plans/unet1d/phases.h), one a convolution, or two, where the first
// one finishes the input; a phase has tiles of (slice of the output channels) x (slice of the input channels: whole
// GroupNorm groups) x (slice of the batch: whole samples).
//   grid    one block a multiprocessor, all resident (a cooperative launch); block i owns tiles i, i + blocks, ...
//   block   8 warps: polls and adds the partial sums of its input slice, normalises them (the groups are whole, so no
//           statistics travel), multiplies, stores its partial sums; or keeps finished values; or multiplies those
//   warp    a row tile of 16 output channels, a part of K, up to 128 columns; its own stream of weights through shared
//           memory, which runs ahead over phases and steps, for weights wait for nobody
//   thread  of a poll: 16-byte words of partial sums, each word with its flag in the lowest bit (the step's parity)
//
// Blocks hand over without barriers, fences or counters: a word says itself whether it is of this step. It is written
// again a step later, when the sample of the next step depends on all that was read before.
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/unet1d/paths.h"
#include "kernels/cuda/unet1d/phases_kernel.cuh"

namespace dpa::kernels::unet1d {
namespace {

template <class Tile>
__global__ void __launch_bounds__(kPhaseWarps * 32, 1) phases_kernel(const __grid_constant__ PhaseLoop a) {
#if __CUDA_ARCH__ >= 800
  device::run_phases<Tile>(a);
#endif
}

template <class Tile>
cudaError_t launch_tile(const PhaseLoop& loop, int blocks, cudaStream_t stream) {
  return LaunchConfig(blocks, kPhaseWarps * 32, stream, loop.shared.bytes)
      .cooperative()
      .launch(phases_kernel<Tile>, loop);
}

cudaError_t launch_phases(DType dtype, const PhaseLoop& loop, int blocks, cudaStream_t stream) {
  switch (dtype) {
    case DType::kBFloat16: return launch_tile<device::TileBf16>(loop, blocks, stream);
    case DType::kFloat16: return launch_tile<device::TileFp16>(loop, blocks, stream);
    case DType::kFloat8E4M3: return launch_tile<device::TileE4m3>(loop, blocks, stream);
    default: return launch_tile<device::TileFp32>(loop, blocks, stream);
  }
}

}  // namespace

cudaError_t run_phases(const Plan& plan, const Call& call, const Workspace& at, const Device& device,
                       cudaStream_t stream) {
  const int samples = phase_samples(plan, call.batch, call.horizon, device);
  if (samples < 1) return cudaErrorInvalidConfiguration;
  auto* workspace = static_cast<uint8_t*>(call.workspace) + at.messages;
  const LoopArguments all = loop_arguments(plan, call, at);
  for (int first = 0; first < call.batch; first += samples) {
    PhaseLoop part = {loop_part(all, first, std::min(samples, call.batch - first))};
    part.noise_stride = int64_t{call.batch} * call.horizon * all.actions;
    const auto phases = phases_of(plan, part.batch, call.horizon, device);
    set_phases(part, plan, *phases, workspace);
    cudaError_t error = cudaMemsetAsync(workspace, 0, phases->workspace_words * sizeof(uint32_t), stream);
    if (error != cudaSuccess) return error;
    error = launch_phases(plan.dtype, part, device.multiprocessors, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace dpa::kernels::unet1d
