// `own::swiglu` on CUDA: out = gate * sigmoid(gate) * value, and both gradients. One thread an element, striding over
// the grid; 16-bit types are widened to float32 for the arithmetic.
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "test/ops/own_op/kernel.h"

namespace own {
namespace {

namespace k = dpa::kernels;
constexpr int kThreads = 256;

template <class A>
__device__ A sigmoid(A x) {
  return 1 / (1 + exp(-x));
}

template <class T>
__global__ void forward(const T* gate, const T* value, T* out, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const auto g = k::widen(gate[i]);
    out[i] = k::narrow<T>(g * sigmoid(g) * k::widen(value[i]));
  }
}

template <class T>
__global__ void backward(const T* grad, const T* gate, const T* value, T* grad_gate, T* grad_value, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const auto d = k::widen(grad[i]), g = k::widen(gate[i]), s = sigmoid(g);
    grad_gate[i] = k::narrow<T>(d * k::widen(value[i]) * s * (1 + g * (1 - s)));
    grad_value[i] = k::narrow<T>(d * g * s);
  }
}

}  // namespace

cudaError_t swiglu_cuda(k::DType dtype, const void* gate, const void* value, void* out, int64_t count,
                        cudaStream_t stream) {
  return k::dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return k::launch(forward<T>, k::grid_for(count, kThreads), kThreads, stream, static_cast<const T*>(gate),
                     static_cast<const T*>(value), static_cast<T*>(out), count);
  });
}

cudaError_t swiglu_backward_cuda(k::DType dtype, const void* grad, const void* gate, const void* value, void* grad_gate,
                                 void* grad_value, int64_t count, cudaStream_t stream) {
  return k::dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return k::launch(backward<T>, k::grid_for(count, kThreads), kThreads, stream, static_cast<const T*>(grad),
                     static_cast<const T*>(gate), static_cast<const T*>(value), static_cast<T*>(grad_gate),
                     static_cast<T*>(grad_value), count);
  });
}

}  // namespace own
