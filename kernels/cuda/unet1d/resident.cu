// The resident path's call: arguments, and the kernel for the weights' type. The kernel: resident_kernel.cuh.
#include "kernels/cuda/unet1d/resident_block.cuh"

namespace dpa::kernels::unet1d {
cudaError_t run_resident(const Plan& plan, const Call& call, const Workspace& at, const Device& device,
                         cudaStream_t stream) {
  Arguments a = {loop_arguments(plan, call, at)};
  a.layout = resident_layout(plan, call.horizon, device);
  if (call.batch != 1 || !a.layout.fits) return cudaErrorInvalidConfiguration;
  a.channels = plan.config.down_dims[0], a.record = call.record;
  a.messages = reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(call.workspace) + at.messages);
  const cudaError_t error = cudaMemsetAsync(a.messages, 0, at.message_bytes, stream);
  if (error != cudaSuccess) return error;
  if (call.record) return launch_recording(plan.dtype, a, stream);
  return dispatch_weights(plan.dtype, [&](auto tag) {
    using Weight = typename decltype(tag)::type;
    return a.layout.parts ? launch_resident<Weight, SoloForm::kParts>(a, stream)
                          : launch_resident<Weight, SoloForm::kPlain>(a, stream);
  });
}

}  // namespace dpa::kernels::unet1d
