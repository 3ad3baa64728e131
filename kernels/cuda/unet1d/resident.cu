// The resident path's call: arguments, and the kernel for the weights' type. The kernel: resident_kernel.cuh.
#include "kernels/cuda/unet1d/resident_kernel.cuh"

namespace dpa::kernels::unet1d {
namespace {

template <class Weight>
cudaError_t launch_resident(const Arguments& a, cudaStream_t stream) {
  switch (a.layout.pairs) {
    case 1: return launch_pairs<Weight, 1>(a, stream);
    case 2: return launch_pairs<Weight, 2>(a, stream);
    case 3: return launch_pairs<Weight, 3>(a, stream);
    case 4: return launch_pairs<Weight, 4>(a, stream);
    default: return cudaErrorInvalidConfiguration;
  }
}

}  // namespace

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
  switch (plan.dtype) {
    case DType::kFloat32: return launch_resident<float>(a, stream);
    case DType::kFloat16: return launch_resident<__half>(a, stream);
    case DType::kBFloat16: return launch_resident<__nv_bfloat16>(a, stream);
    case DType::kFloat8E4M3: return launch_resident<__nv_fp8_e4m3>(a, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace dpa::kernels::unet1d
