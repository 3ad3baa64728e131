// `dpa::fused_relu_add` on CUDA: out = relu(x) + y + bias. The kernels and their map are in elementwise.cuh.
#include "kernels/cuda/common/elementwise.cuh"
#include "kernels/cuda/fused_relu_add/fused_relu_add.h"

namespace dpa::kernels {
namespace {

template <class A>
struct ReluAdd {
  A bias;
  /// The comparison is that way round so that NaN stays NaN.
  __device__ A operator()(A x, A y) const { return (x < A(0) ? A(0) : x) + y + bias; }
};

}  // namespace

cudaError_t fused_relu_add(const Elementwise& args, double bias, cudaStream_t stream) {
  return launch_elementwise(args, stream, [bias]<class A>(A) { return ReluAdd<A>{static_cast<A>(bias)}; });
}

}  // namespace dpa::kernels
