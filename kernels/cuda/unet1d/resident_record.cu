// The one-sample kernel once more, recording the clocks of its last step.
#include "kernels/cuda/unet1d/resident_kernel.cuh"

namespace dpa::kernels::unet1d {
namespace {

template <class Weight>
cudaError_t launch(const Arguments& a, cudaStream_t stream) {
  switch (a.layout.pairs) {
    case 1: return launch_pairs<Weight, 1, true>(a, stream);
    case 2: return launch_pairs<Weight, 2, true>(a, stream);
    default: return cudaErrorInvalidConfiguration;  // the others keep no record
  }
}

}  // namespace

cudaError_t launch_recording(DType dtype, const Arguments& a, cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat32: return launch<float>(a, stream);
    case DType::kFloat16: return launch<__half>(a, stream);
    case DType::kBFloat16: return launch<__nv_bfloat16>(a, stream);
    case DType::kFloat8E4M3: return launch<__nv_fp8_e4m3>(a, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace dpa::kernels::unet1d
