// `dpa::sinusoidal_embedding` on CUDA: a thread a sine and the cosine of the same angle.
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/sinusoidal_embedding/sinusoidal_embedding.h"

namespace dpa::kernels {
namespace {

constexpr int kThreads = 128;

template <class In, class Out>
__global__ void __launch_bounds__(kThreads)
    sinusoids(const In* timesteps, int64_t count, int64_t half, double log_step, Out* out) {
  using Angle = std::conditional_t<std::is_same_v<In, double>, double, float>;
  grid_dependency_sync();
  const int64_t e = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (e >= count * half) return;
  const int64_t row = e / half, i = e - row * half;
  const Angle frequency = exp(static_cast<Angle>(i) * static_cast<Angle>(log_step));
  const Angle angle = static_cast<Angle>(timesteps[row]) * frequency;
  out[2 * row * half + i] = narrow<Out>(sin(angle));
  out[(2 * row + 1) * half + i] = narrow<Out>(cos(angle));
}

}  // namespace

cudaError_t sinusoidal_embedding(const SinusoidalEmbedding& args, cudaStream_t stream) {
  const int64_t half = args.dim / 2, blocks = (args.count * half + kThreads - 1) / kThreads;
  const auto launch = [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    return launch_dependent(sinusoids<In, Out>, static_cast<unsigned>(blocks), kThreads, stream,
                            static_cast<const In*>(args.timesteps), args.count, half, args.log_step,
                            static_cast<Out*>(args.out));
  };
  const auto of_type = [&](auto in) {
    switch (args.out_type) {
      case DType::kFloat64: return launch(in, double{});
      case DType::kFloat32: return launch(in, float{});
      case DType::kFloat16: return launch(in, __half{});
      default: return launch(in, __nv_bfloat16{});
    }
  };
  switch (args.type) {
    case SinusoidalEmbedding::Timesteps::kInt64: return of_type(int64_t{});
    case SinusoidalEmbedding::Timesteps::kFloat32: return of_type(float{});
    default: return of_type(double{});
  }
}

}  // namespace dpa::kernels
