// A layer of an image encoder: y = relu(norm(conv(x, w) + bias) scale + shift + residual), in one launch.
//
// Dimensions: kernels/plans/conv2d/plan.h. A GEMM of rows (n, p, q), columns k and K = (r, s, c), in chunks of 128 bytes.
//   grid    tiles of rows x columns x splits of K, of convolutions that do not depend on each other
//   block   8 warps in teams; a team contracts a share of the chunks in a circular buffer of its own, so teams do not wait
//           for one another; cp.async brings A, and B too but on Hopper, where one bulk copy a chunk does
//   warp    m_tiles x n_tiles fragments of 16 x 16; A by ldmatrix; B by ldmatrix for mma.sync, or, on Hopper, in place for
//           wgmma of four warps: there a warp issues 4 to 8 times fewer instructions
//   thread  copies one piece of 16 bytes of every few rows; in the epilogue owns quads of the tile, then pieces of it
//
// Tilings by im2col (im2col.cuh) are Hopper's for many pixels: A comes by TMA, and wgmma takes it from shared memory, too, so no
// warp copies, loads fragments or rounds, and the tensor cores are at their rate while stages last.
//
// The epilogue adds the teams' sums in shared memory and the splits' by messages through L2, each in a fixed order. A
// GroupNorm takes moments of what the tile holds (mean first, then deviations); where a (sample, group) lies in several
// tiles, blocks exchange their parts' moments by messages and each combines all, in a fixed order. A word of a message
// carries a flag in its lowest bit, so none is awaited by itself, and an exchange costs one trip through L2. Blocks that
// wait for one another must all be resident; where a grid is larger, the kernel stores raw values and moments
// (`deferred`), and a second pass normalises in place.
//
// Why one block does it all: at batch 1 a layer's GEMM takes less than 1 us of the GPU, and its time is latency. A 3 x 3
// layer of ResNet-18 at 84 x 84, 2 images, takes 6 to 8 us on 132 multiprocessors, the next launch's start hidden in it. Large
// images are bound by what multiprocessors read from L2: there the taps of a filter share the pixels that a block holds (`taps`
// in plan.h), and networks of one size share a launch.
#include "kernels/cuda/conv2d/conv_kernel.cuh"

namespace dpa::kernels::conv2d {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads)
    pool_kernel(const __grid_constant__ Pools a, PoolKind kind, uint32_t* finished) {
#if __CUDA_ARCH__ >= 800
  device::dependency_trigger();
  device::dependency_sync();
  const Pool& pool = a.pools[blockIdx.y];
  if (kind == PoolKind::kMax)
    device::max_pool<T>(pool);
  else if (kind == PoolKind::kAverage)
    device::average_pool<T>(pool);
  else
    device::spatial_softmax<T>(pool);
  if (finished && blockIdx.x + blockIdx.y == 0 && threadIdx.x == 0) *finished += 1;
#endif
}

template <class T, bool kNormalised>
__global__ void __launch_bounds__(kThreads, 2)
    max_pool_3x3_kernel(const __grid_constant__ Pools a, const __grid_constant__ RawMaps raw, uint32_t* finished) {
#if __CUDA_ARCH__ >= 800
  device::dependency_trigger();
  device::dependency_sync();
  const uint32_t flag = kNormalised ? call_flag(raw.epoch) : 0;
  device::max_pool_3x3<T, kNormalised>(a.pools[blockIdx.y], raw.convs[blockIdx.y], flag);
  if (finished && blockIdx.x + blockIdx.y == 0 && threadIdx.x == 0) *finished += 1;
#endif
}

template <class T>
__global__ void __launch_bounds__(kThreads, 3)
    normalise_kernel(const __grid_constant__ Conv conv, const uint32_t* epoch) {
#if __CUDA_ARCH__ >= 800
  device::dependency_trigger();
  device::dependency_sync();
  device::normalise<T>(conv, call_flag(epoch));
#endif
}

template <class F>
cudaError_t by_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32: return f(device::Tf32{});
    case DType::kFloat16: return f(device::Fp16{});
    case DType::kBFloat16: return f(device::Bf16{});
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

bool has_wgmma() { return runs_hopper_code(); }

cudaError_t launch_convs(DType dtype, int tiling, const Launch& launch, bool dependent, cudaStream_t stream) {
  return by_type(dtype, [&](auto type) { return launch_tiling<decltype(type)>(tiling, launch, dependent, stream); });
}

cudaError_t launch_stems(DType dtype, const Stems& stems, int blocks, bool wgmma, bool dependent, cudaStream_t stream) {
  return by_type(dtype,
                 [&](auto type) { return launch_stem_of<decltype(type)>(stems, blocks, wgmma, dependent, stream); });
}

cudaError_t launch_pools(DType dtype, PoolKind kind, const Pools& pools, uint32_t* finished, bool dependent,
                         cudaStream_t stream) {
  const Pool& pool = pools.pools[0];
  const int pieces = pool.batch * pool.pieces;
  const int64_t blocks = kind == PoolKind::kMax
                             ? (int64_t{pieces} * pool.out_height * pool.out_width + kThreads - 1) / kThreads
                             : (pieces + kWarps - 1) / kWarps;
  const dim3 grid(grid_for(blocks, 1), pools.count);
  return by_type(dtype, [&](auto type) {
    using T = decltype(type);
    return kind == PoolKind::kMax && pool.kernel == 3
               ? launch_with(max_pool_3x3_kernel<T, false>, grid, kThreads, 0, false, dependent, stream, pools,
                             RawMaps{}, finished)
               : launch_with(pool_kernel<T>, grid, kThreads, 0, false, dependent, stream, pools, kind, finished);
  });
}

cudaError_t launch_normalised_pools(DType dtype, const Pools& pools, const RawMaps& raw, int blocks, bool dependent,
                                    cudaStream_t stream) {
  uint32_t* const finished = nullptr;
  return by_type(dtype, [&](auto type) {
    return launch_with(max_pool_3x3_kernel<decltype(type), true>, dim3(blocks, pools.count), kThreads,
                       raw.convs[0].groups * 8, false, dependent, stream, pools, raw, finished);
  });
}

cudaError_t launch_normalise(DType dtype, const Conv& conv, const uint32_t* epoch, int blocks, bool dependent,
                             cudaStream_t stream) {
  return by_type(dtype, [&](auto type) {
    return launch_with(normalise_kernel<decltype(type)>, blocks, kThreads, conv.groups * 8, false, dependent, stream,
                       conv, epoch);
  });
}

}  // namespace dpa::kernels::conv2d
