// The one-sample kernel once more, recording the clocks of its last step.
#include "kernels/cuda/unet1d/resident_kernel.cuh"

namespace dpa::kernels::unet1d {
// With more pairs a thread there is no room for it.
cudaError_t launch_recording(DType dtype, const Arguments& a, cudaStream_t stream) {
  return dispatch_weights(
      dtype, [&](auto tag) { return launch_pairs<typename decltype(tag)::type, SoloForm::kRecord, 1, 2>(a, stream); });
}

}  // namespace dpa::kernels::unet1d
