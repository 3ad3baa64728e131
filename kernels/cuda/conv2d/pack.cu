// Packs a convolution's weights (pack.cuh): a thread writes words, a grid strides over all.
#include "kernels/cuda/conv2d/launch.h"
#include "kernels/cuda/conv2d/pack.cuh"

namespace dpa::kernels::conv2d {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads) pack_kernel(Shape s, int pieces, int chunks, const float* weights,
                                                        const float* factor, uint32_t* packed, bool cells) {
#if __CUDA_ARCH__ >= 800
  device::pack_weights<T>(s, pieces, chunks, weights, factor, packed, cells);
#endif
}

}  // namespace

cudaError_t launch_pack(const Shape& shape, const float* weights, const float* factor, void* packed,
                        cudaStream_t stream, bool cells) {
  const auto kernel = shape.dtype == DType::kFloat32   ? pack_kernel<device::Tf32>
                      : shape.dtype == DType::kFloat16 ? pack_kernel<device::Fp16>
                                                       : pack_kernel<device::Bf16>;
  const unsigned blocks = grid_for(static_cast<int64_t>(weight_bytes(shape) / 4), kThreads);
  return launch(kernel, blocks, kThreads, stream, shape, pieces_of(shape.dtype, shape.channels), chunks_of(shape),
                weights, factor, static_cast<uint32_t*>(packed), cells);
}

}  // namespace dpa::kernels::conv2d
