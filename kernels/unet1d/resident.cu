// The resident path's call: arguments, and the kernel for the weights' type. The kernel: resident_kernel.cuh.
#include "kernels/unet1d/resident_kernel.cuh"

namespace dpa::kernels::unet1d {
namespace {

template <class Weight>
cudaError_t launch_resident(const Arguments& a, cudaStream_t stream) {
  switch (a.layout.pairs) {
    case 1: return launch_pairs<Weight, 1>(a, stream);
    case 2: return launch_pairs<Weight, 2>(a, stream);
    default:
      if constexpr (sizeof(Weight) == 1)
        return cudaErrorInvalidConfiguration;
      else
        return launch_pairs<Weight, 0>(a, stream);
  }
}

}  // namespace

cudaError_t run_resident(const Plan& plan, const Call& call, const Workspace& at, cudaStream_t stream) {
  int device = 0, shared_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  auto* base = static_cast<uint8_t*>(call.workspace);
  Arguments a = {};
  a.layout = resident_layout(plan, call.batch, call.horizon, shared_bytes);
  if (!a.layout.fits) return cudaErrorInvalidConfiguration;
  a.batch = call.batch, a.horizon = call.horizon, a.steps = call.steps;
  a.actions = plan.config.action_dim, a.taps = plan.config.kernel_size, a.channels = plan.config.down_dims[0],
  a.film_scale = plan.config.film_scale;
  a.weights = static_cast<const uint8_t*>(call.packed);
  a.floats = reinterpret_cast<const float*>(a.weights + plan.floats);
  a.film_step = reinterpret_cast<const float*>(base + at.step),
  a.film_cond = call.batch > 1 ? reinterpret_cast<const float*>(base + at.cond)
                               : nullptr;  // one sample: it is in film_step already
  a.film_rows = plan.film_rows;
  a.film_step_stride = call.per_sample_timesteps ? 0 : plan.film_rows;
  a.film_sample_stride = call.per_sample_timesteps ? plan.film_rows : 0;
  a.head = plan.head, a.tail = plan.tail;
  a.messages = reinterpret_cast<uint32_t*>(base + at.messages);
  a.initial = call.initial, a.table = call.table, a.noise = call.noise, a.known = call.known,
  a.mask = call.known ? call.known_mask : nullptr;
  a.output = call.output, a.clip = call.clip, a.record = call.record;
  error = cudaMemsetAsync(a.messages, 0, at.message_bytes, stream);
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
