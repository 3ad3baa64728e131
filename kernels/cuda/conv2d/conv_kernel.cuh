// The kernels of an image encoder's convolutions, for one type: convolution_*.cu compile them apart, beside one another.
#pragma once
#include "kernels/cuda/conv2d/im2col.cuh"
#include "kernels/cuda/conv2d/input_map.h"
#include "kernels/cuda/conv2d/launch.h"
#include "kernels/cuda/conv2d/pool.cuh"

namespace dpa::kernels::conv2d {

template <class T>
cudaError_t launch_tiling(int tiling, const Launch& launch, bool dependent, cudaStream_t stream);
template <class T>
cudaError_t launch_stem_of(const Stems& stems, int blocks, bool wgmma, bool dependent, cudaStream_t stream);

// The epoch is read behind the grid dependency: the launch before may zero it, or count the call before.
DPA_DEVICE uint32_t call_flag(const uint32_t* epoch) { return (device::load_message_word(epoch) + 1) & 1; }

template <class... Parameters, class... Arguments>
cudaError_t launch_with(void (*kernel)(Parameters...), dim3 blocks, int threads, int shared, bool waits, bool dependent,
                        cudaStream_t stream, const Arguments&... arguments) {
  if (blocks.x == 0) return cudaSuccess;
  LaunchConfig config(blocks, threads, stream, shared);
  config.cooperative(waits);
  if (dependent) config.dependent(reinterpret_cast<const void*>(kernel));
  return config.launch(kernel, arguments...);
}

#ifdef DPA_CONV_KERNEL
// Whether code for this architecture holds the forms by warpgroups.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasWgmma = true;
#else
constexpr bool kHasWgmma = false;
#endif

template <class C, class T>
__global__ void __launch_bounds__(kThreads, C::kTiling.blocks()) conv_kernel(const __grid_constant__ Launch a) {
#if __CUDA_ARCH__ >= 800
  device::dependency_trigger();
  if constexpr (kHasWgmma || !C::kTiling.wgmma)
    device::convolve<C, T>(a.convs, a.count, a.blocks, [&] {
      device::dependency_sync();
      return call_flag(a.epoch);
    });
#endif
}
template <class C, class T>
__global__ void __launch_bounds__(C::kTiling.threads(), C::kTiling.blocks())
    im2col_kernel(const __grid_constant__ Launch a, const __grid_constant__ InputMaps inputs) {
#if __CUDA_ARCH__ >= 800
  device::dependency_trigger();
  if constexpr (kHasWgmma)
    device::convolve_boxes<C, T>(a.convs, a.count, a.blocks, inputs.maps, [&] {
      device::dependency_sync();
      return call_flag(a.epoch);
    });
#endif
}

template <class T, bool kWgmma>
__global__ void __launch_bounds__(kThreads, T::kElements == 4 ? 1 : 2) stem_kernel(const __grid_constant__ Stems a) {
#if __CUDA_ARCH__ >= 800
  device::dependency_trigger();
  if constexpr (kHasWgmma || !kWgmma)
    device::stem<T, kWgmma>(a.stems[blockIdx.y], blockIdx.x, gridDim.x, [] { device::dependency_sync(); });
#endif
}

template <class T, int kIndex = 0>
cudaError_t launch_from(int tiling, const Launch& launch, bool dependent, cudaStream_t stream) {
  if constexpr (kIndex == kNumTilings) {
    return cudaErrorInvalidValue;
  } else {
    if (tiling != kIndex) return launch_from<T, kIndex + 1>(tiling, launch, dependent, stream);
    using C = device::Config<kIndex>;
    constexpr int kShared = shared_bytes(C::kTiling);
    if constexpr (C::kTiling.im2col) {
      InputMaps inputs;
      for (int i = 0; i < launch.count; i++)
        if (const auto error = make_input_map(T::kType, launch.convs[i], C::kTiling.rows(), &inputs.maps[i]))
          return error;
      return launch_with(im2col_kernel<C, T>, launch.blocks, C::kTiling.threads(), kShared, launch.waits, dependent,
                         stream, launch, inputs);
    } else {
      return launch_with(conv_kernel<C, T>, launch.blocks, kThreads, kShared, launch.waits, dependent, stream, launch);
    }
  }
}
template <class T>
cudaError_t launch_tiling(int tiling, const Launch& launch, bool dependent, cudaStream_t stream) {
  return launch_from<T>(tiling, launch, dependent, stream);
}
template <class T>
cudaError_t launch_stem_of(const Stems& stems, int blocks, bool wgmma, bool dependent, cudaStream_t stream) {
  const auto go = [&](auto kernel) {
    return launch_with(kernel, dim3(blocks, stems.count), kThreads, sizeof(device::StemTile<T>), false, dependent,
                       stream, stems);
  };
  return wgmma ? go(stem_kernel<T, true>) : go(stem_kernel<T, false>);
}
#define DPA_CONV_KERNELS(T)                                                                                       \
  static_assert(sizeof(device::StemTile<T>) == 2 * device::StemTile<T>::kPieces * kStemColumns * kChunkBytes +    \
                                                   2 * sizeof(device::StemTile<T>::cells[0]) + kStemColumns * 8 + \
                                                   128 + sizeof(device::StemTile<T>::made));                      \
  template cudaError_t launch_tiling<T>(int, const Launch&, bool, cudaStream_t);                                  \
  template cudaError_t launch_stem_of<T>(const Stems&, int, bool, bool, cudaStream_t);
#endif

}  // namespace dpa::kernels::conv2d
