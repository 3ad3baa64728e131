// A layer of an image encoder: y = relu(norm(conv(x, w) + bias) scale + shift + residual), in one launch.
//
// Dimensions: kernels/plans/conv2d/plan.h. A GEMM of rows (n, p, q), columns k and K = (r, s, c), in chunks of 128 bytes.
//   grid    tiles of rows x columns x splits of K, of up to four convolutions that do not depend on each other
//   block   8 warps in teams; a team contracts a share of the chunks into a circular buffer of its own (cp.async), so teams
//           do not wait for one another
//   warp    m_tiles x n_tiles fragments of 16 x 16 by mma.sync; A by ldmatrix, B packed as fragments
//   thread  copies one piece of 16 bytes of every few rows; in the epilogue owns quads of the tile, then pieces of it
//
// The epilogue adds the teams' sums in shared memory and the splits' by messages through L2, each in a fixed order. A
// GroupNorm takes moments of what the tile holds (mean first, then deviations); where a (sample, group) lies in several
// tiles, blocks exchange their parts' moments by messages and each combines all, in a fixed order. A word of a message
// carries the call's parity in its lowest bit, so no flag is awaited, nothing is reset, and an exchange costs one trip
// through L2. Blocks that wait for one another must all be resident; where a grid is larger, the kernel stores raw values
// and moments (`deferred`), and a second pass normalises in place.
//
// Why one block does it all: at batch 1 a layer's GEMM takes less than 1 us of the GPU, and its time is latency. A 3 x 3
// layer of ResNet-18 at 84 x 84, 2 images, takes 6 to 8 us on 132 multiprocessors, the next launch's start hidden in it. Large
// images are bound by what multiprocessors read from L2: there the taps of a filter share the pixels that a block holds (`taps`
// in plan.h), and two blocks share a multiprocessor.
#include "kernels/cuda/common/shared_memory.h"
#include "kernels/cuda/conv2d/launch.h"
#include "kernels/cuda/conv2d/pool.cuh"

namespace dpa::kernels::conv2d {
namespace {

// The epoch is read behind the grid dependency, for the call before counts itself at its end.
DPA_DEVICE uint32_t call_flag(const uint32_t* epoch) { return (device::load_word(epoch) + 1) & 1; }

template <class C, class T>
__global__ void __launch_bounds__(kThreads, C::kTiling.blocks()) conv_kernel(const __grid_constant__ Launch a) {
#if __CUDA_ARCH__ >= 800
  device::dependency_trigger();
  device::convolve<C, T>(a.convs, a.count, a.blocks, [&] {
    device::dependency_sync();
    return call_flag(a.epoch);
  });
#endif
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    pool_kernel(const __grid_constant__ Pool pool, PoolKind kind, uint32_t* finished) {
#if __CUDA_ARCH__ >= 800
  device::dependency_trigger();
  device::dependency_sync();
  if (kind == PoolKind::kMax)
    device::max_pool<T>(pool);
  else if (kind == PoolKind::kAverage)
    device::average_pool<T>(pool);
  else
    device::spatial_softmax<T>(pool);
  if (finished && blockIdx.x == 0 && threadIdx.x == 0) *finished += 1;
#endif
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    normalise_kernel(const __grid_constant__ Conv conv, const uint32_t* epoch) {
#if __CUDA_ARCH__ >= 800
  device::dependency_trigger();
  device::dependency_sync();
  device::normalise<T>(conv, call_flag(epoch));
#endif
}

template <class... Parameters, class... Arguments>
cudaError_t launch_with(void (*kernel)(Parameters...), int blocks, int shared, bool waits, bool dependent,
                        cudaStream_t stream, const Arguments&... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (const auto error = allow_shared_memory(reinterpret_cast<const void*>(kernel), shared)) return error;
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (waits) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  if (dependent && launches_dependent(reinterpret_cast<const void*>(kernel))) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks, config.blockDim = kThreads, config.stream = stream, config.dynamicSmemBytes = shared;
  config.attrs = attributes, config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <class T>
cudaError_t launch_tiling(int tiling, const Launch& launch, bool dependent, cudaStream_t stream) {
  const auto go = [&](auto kernel) {
    return launch_with(kernel, launch.blocks, shared_bytes(kTilings[tiling]), launch.waits, dependent, stream, launch);
  };
  switch (tiling) {
    case 0: return go(conv_kernel<device::Config<0>, T>);
    case 1: return go(conv_kernel<device::Config<1>, T>);
    case 2: return go(conv_kernel<device::Config<2>, T>);
    case 3: return go(conv_kernel<device::Config<3>, T>);
    case 4: return go(conv_kernel<device::Config<4>, T>);
    case 5: return go(conv_kernel<device::Config<5>, T>);
    case 6: return go(conv_kernel<device::Config<6>, T>);
    case 7: return go(conv_kernel<device::Config<7>, T>);
    case 8: return go(conv_kernel<device::Config<8>, T>);
    case 9: return go(conv_kernel<device::Config<9>, T>);
    case 10: return go(conv_kernel<device::Config<10>, T>);
    default: return cudaErrorInvalidValue;
  }
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

cudaError_t launch_convs(DType dtype, int tiling, const Launch& launch, bool dependent, cudaStream_t stream) {
  return by_type(dtype, [&](auto type) { return launch_tiling<decltype(type)>(tiling, launch, dependent, stream); });
}

cudaError_t launch_pool(DType dtype, PoolKind kind, const Pool& pool, uint32_t* finished, bool dependent,
                        cudaStream_t stream) {
  const int pieces = pool.batch * pool.pieces;
  const int64_t blocks = kind == PoolKind::kMax
                             ? (int64_t{pieces} * pool.out_height * pool.out_width + kThreads - 1) / kThreads
                             : (pieces + kWarps - 1) / kWarps;
  return by_type(dtype, [&](auto type) {
    return launch_with(pool_kernel<decltype(type)>, grid_for(blocks, 1), 0, false, dependent, stream, pool, kind,
                       finished);
  });
}

cudaError_t launch_normalise(DType dtype, const Conv& conv, const uint32_t* epoch, int blocks, bool dependent,
                             cudaStream_t stream) {
  return by_type(dtype, [&](auto type) {
    return launch_with(normalise_kernel<decltype(type)>, blocks, conv.groups * 8, false, dependent, stream, conv,
                       epoch);
  });
}

}  // namespace dpa::kernels::conv2d
