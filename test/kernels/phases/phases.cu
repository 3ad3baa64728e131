// The general engine: the whole sampling loop in one persistent kernel, for compute capability 8.0 and later, any
// number of multiprocessors, any sizes of the family.
//
// Dimensions: a network is a list of phases (plan.h), one a convolution; a phase has tiles of
// (slice of the output channels) x (slice of the input channels: whole GroupNorm groups) x (slice of the batch: whole
// samples).
//   grid    one block a multiprocessor, all resident (a cooperative launch); block i owns tiles i, i + blocks, ...
//   block   8 warps: polls and adds the partial sums of its input slice, normalises them (the groups are whole, so no
//           statistics travel), multiplies, stores its partial sums
//   warp    a row tile of 16 output channels, a part of K, up to 64 columns; its own stream of weights through shared
//           memory, which runs ahead over phases and steps, for weights wait for nobody
//   thread  of a poll: 16-byte words of partial sums, each word with its flag in the lowest bit (the step's parity)
//
// Blocks hand over without barriers, fences or counters: a word says itself whether it is of this step. It is written
// again a step later, when the sample of the next step depends on all that was read before.
#include "test/kernels/phases/kernel.cuh"

namespace dpa::kernels::unet1d {
namespace {

template <class Tile, int kSlots>
__global__ void __launch_bounds__(kPhaseWarps * 32, 1) phases_kernel(const __grid_constant__ PhaseLoop a) {
#if __CUDA_ARCH__ >= 800
  device::run_phases<Tile, kSlots>(a);
#endif
}

template <class Tile, int kSlots>
cudaError_t launch_kernel(const PhasePlan& plan, const PhaseLoop& loop, int blocks, cudaStream_t stream) {
  const auto kernel = phases_kernel<Tile, kSlots>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared.bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks, config.blockDim = kPhaseWarps * 32, config.stream = stream;
  config.dynamicSmemBytes = plan.shared.bytes;
  cudaLaunchAttribute cooperative = {};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  config.attrs = &cooperative, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, loop);
}

#ifdef DPA_ROOMY_ALONE  // a test's build, which takes half the time
template <class Tile>
cudaError_t launch_tile(const PhasePlan& plan, const PhaseLoop& loop, int blocks, cudaStream_t stream) {
  return launch_kernel<Tile, Tile::kSlots>(plan, loop, blocks, stream);
}
#else
template <class Tile>
cudaError_t launch_tile(const PhasePlan& plan, const PhaseLoop& loop, int blocks, cudaStream_t stream) {
  return plan.ring_slots == Tile::kSlots ? launch_kernel<Tile, Tile::kSlots>(plan, loop, blocks, stream)
                                         : launch_kernel<Tile, Tile::kSlotsTight>(plan, loop, blocks, stream);
}
#endif

}  // namespace

cudaError_t launch_phases(DType dtype, const PhasePlan& plan, const PhaseLoop& loop, int blocks, cudaStream_t stream) {
  switch (dtype) {
    case DType::kBFloat16: return launch_tile<device::TileBf16>(plan, loop, blocks, stream);
    case DType::kFloat16: return launch_tile<device::TileFp16>(plan, loop, blocks, stream);
    case DType::kFloat8E4M3: return launch_tile<device::TileE4m3>(plan, loop, blocks, stream);
    default: return launch_tile<device::TileFp32>(plan, loop, blocks, stream);
  }
}

}  // namespace dpa::kernels::unet1d
