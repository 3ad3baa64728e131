// Preprocessing of images (preprocess.cuh): a thread a pixel or a cell of 2 x 2 pixels, all their taps; no intermediate image.
// A pixel of a picture that is halved has 16 taps of 3 channels, from L1.
#include <algorithm>

#include "kernels/cuda/conv2d/launch.h"
#include "kernels/cuda/conv2d/preprocess.cuh"

namespace dpa::kernels::conv2d {
namespace {

constexpr int kZerosOfAThread = 8;

template <class T, class S, bool kResized>
__global__ void __launch_bounds__(kThreads) preprocess_kernel(const __grid_constant__ Preprocesses a) {
#if __CUDA_ARCH__ >= 800
  device::dependency_trigger();
  device::dependency_sync();
  device::zero_messages(a, (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kThreads + threadIdx.x,
                        int64_t{gridDim.x} * gridDim.y * kThreads);
  device::preprocess<T, S, kResized>(a.items[blockIdx.y]);
#endif
}

template <class T>
cudaError_t launch_to(const Preprocesses& a, bool dependent, cudaStream_t stream) {
  const Preprocess& p = a.items[0];
  const int side = p.cells ? 2 : 1;
  const int64_t all = int64_t{p.batch} * ((p.crop_height + side - 1) / side) * ((p.crop_width + side - 1) / side);
  const int64_t zeros = a.message_pieces / (kZerosOfAThread * a.count);
  const dim3 blocks(grid_for(std::max(all, zeros), kThreads), a.count);
  const auto go = [&](auto kernel) {
    return dependent ? launch_dependent(kernel, blocks, kThreads, stream, a)
                     : launch(kernel, blocks, kThreads, stream, a);
  };
  const bool resized = p.height != p.resized_height || p.width != p.resized_width;
  switch (p.pixel) {
    case Pixel::kUint8:
      return resized ? go(preprocess_kernel<T, uint8_t, true>) : go(preprocess_kernel<T, uint8_t, false>);
    case Pixel::kFloat32:
      return resized ? go(preprocess_kernel<T, float, true>) : go(preprocess_kernel<T, float, false>);
    case Pixel::kBFloat16:
      return resized ? go(preprocess_kernel<T, uint16_t, true>) : go(preprocess_kernel<T, uint16_t, false>);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_preprocess(DType dtype, const Preprocesses& a, bool dependent, cudaStream_t stream) {
  const Preprocess& p = a.items[0];
  if (p.channels < 1 || p.channels > 4 || (p.cells && p.channels != 3)) return cudaErrorInvalidValue;
  switch (dtype) {
    case DType::kFloat32: return launch_to<device::Tf32>(a, dependent, stream);
    case DType::kFloat16: return launch_to<device::Fp16>(a, dependent, stream);
    case DType::kBFloat16: return launch_to<device::Bf16>(a, dependent, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace dpa::kernels::conv2d
