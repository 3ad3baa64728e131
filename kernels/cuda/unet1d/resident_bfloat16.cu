// The one-sample kernel for such weights.
#include "kernels/cuda/unet1d/resident_kernel.cuh"

namespace dpa::kernels::unet1d {

template <>
cudaError_t launch_resident<__nv_bfloat16>(const Arguments& a, cudaStream_t stream) {
  return launch_pairs<__nv_bfloat16, false, 1, 2, 3, 4>(a, stream);
}

}  // namespace dpa::kernels::unet1d
