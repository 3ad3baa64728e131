// `dpa::elementwise_mult` on CUDA: out = a * b. The kernels and their map are in elementwise.cuh.
#include "kernels/cuda/common/elementwise.cuh"
#include "kernels/cuda/elementwise_mult/elementwise_mult.h"

namespace dpa::kernels {
namespace {

template <class A>
struct Multiply {
  __device__ A operator()(A a, A b) const { return a * b; }
};

}  // namespace

cudaError_t elementwise_mult(const Elementwise& args, cudaStream_t stream) {
  return launch_elementwise(args, stream, []<class A>(A) { return Multiply<A>{}; });
}

}  // namespace dpa::kernels
