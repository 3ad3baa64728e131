// prepare    sample_rows[r, a] = sample[r, a];  sinusoids[t, i] = sin(timestep[t] f_i), behind them the cosines, with
//            f_i = 10000^(-i / (step_dim / 2 - 1)); angles reach 1000 radians, so they are float32;
//            film[b] = film_step + film_cond[b], eight elements a thread
// condition  out[b, c] = mish(cat(first, second)[b, c])
//
// to_actions out[r, a] = sum over c of x[r, c] weight[a, c] + bias[a]
//
// The first two: a thread an element of the padded rows; the grid strides over what is left. The last: a warp a row,
// eight neighbouring channels a lane at a time.
#include <algorithm>

#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/unet1d_batch/unet1d_batch.h"
#include "kernels/math/mish.h"

namespace dpa::kernels::unet1d_batch {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;

template <class T>
__device__ __forceinline__ T sinusoid(const Inputs& in, int64_t time, int i) {
  const int half = in.step_dim / 2;
  if (i >= 2 * half) return narrow<T>(0);
  const float timestep = in.integers ? static_cast<float>(static_cast<const int64_t*>(in.timesteps)[time])
                                     : static_cast<const float*>(in.timesteps)[time];
  const float log_step = -9.21034037f / static_cast<float>(half - 1);  // log(10000)
  const float angle = timestep * expf(static_cast<float>(i % half) * log_step);
  return narrow<T>(i < half ? sinf(angle) : cosf(angle));
}

template <class T>
__device__ __forceinline__ void add_film(const Inputs& in, int64_t i, int64_t eights) {
  using Eight = Vector<T, 8>;
  const Eight step = static_cast<const Eight*>(in.film_step)[i % eights],
              cond = static_cast<const Eight*>(in.film_cond)[i];
  Eight sum;
#pragma unroll
  for (int e = 0; e < 8; ++e) sum.data[e] = narrow<T>(widen(step.data[e]) + widen(cond.data[e]));
  static_cast<Eight*>(in.film)[i] = sum;
}

template <class T, class S>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ Inputs in) {
  grid_dependency_sync();
  trigger_dependent_launch();
  const int64_t of_sample = in.rows * in.action_width, of_both = of_sample + in.times * in.step_width,
                eights = in.film_rows / 8, total = of_both + in.film_batch * eights;
  for (int64_t e = int64_t{blockIdx.x} * kThreads + threadIdx.x; e < total; e += int64_t{gridDim.x} * kThreads) {
    if (e < of_sample) {
      const int64_t row = e / in.action_width, a = e % in.action_width;
      const float value = a < in.action_dim ? widen(static_cast<const S*>(in.sample)[row * in.action_dim + a]) : 0.0f;
      static_cast<T*>(in.sample_rows)[e] = narrow<T>(value);
    } else if (e >= of_both) {
      add_film<T>(in, e - of_both, eights);
    } else {
      const int64_t i = e - of_sample;
      static_cast<T*>(in.sinusoids)[i] = sinusoid<T>(in, i / in.step_width, static_cast<int>(i % in.step_width));
    }
  }
}

template <class T, class S>
__global__ void __launch_bounds__(kThreads) condition_kernel(const __grid_constant__ Condition c) {
  grid_dependency_sync();
  trigger_dependent_launch();
  const int64_t total = c.batch * c.width;
  for (int64_t e = int64_t{blockIdx.x} * kThreads + threadIdx.x; e < total; e += int64_t{gridDim.x} * kThreads) {
    const int64_t b = e / c.width;
    const int i = static_cast<int>(e % c.width), j = i - c.first_channels;
    float value = 0;  // mish(0) is 0
    if (j < 0)
      value = widen(static_cast<const T*>(c.first)[(c.first_rows == 1 ? 0 : b) * c.first_channels + i]);
    else if (j < c.second_channels)  // rounded first, as autocast rounds it
      value = widen(narrow<T>(widen(static_cast<const S*>(c.second)[b * c.second_channels + j])));
    static_cast<T*>(c.out)[e] = narrow<T>(math::mish(value));
  }
}

// The warp's sum of value `lane` modulo kMost.
template <int kMost>
__device__ __forceinline__ float sum_of_lane(float (&sums)[kMost]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = kMost / 2; half > 0; half /= 2) {
    const bool upper = lane & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float given = upper ? sums[i] : sums[i + half], kept = upper ? sums[i + half] : sums[i];
      sums[i] = kept + __shfl_xor_sync(~0u, given, half);
    }
  }
#pragma unroll
  for (int offset = kMost; offset < 32; offset *= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], offset);
  return sums[0];
}

// kMost: actions, at most.
template <class T, class S, int kMost>
__global__ void __launch_bounds__(kThreads) actions_kernel(const __grid_constant__ Actions args) {
  using Eight = Vector<T, 8>;
  grid_dependency_sync();
  const int64_t row = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (row >= args.rows) return;
  const int lane = threadIdx.x % 32;
  const T* const x = static_cast<const T*>(args.x) + row * args.channels;
  constexpr int kAtOnce = 8;  // actions whose weights are loaded together
  float sums[kMost] = {};
  for (int c = lane * 8; c < args.channels; c += 256) {
    const auto xs = *reinterpret_cast<const Eight*>(x + c);
    const T* const weights = static_cast<const T*>(args.weight) + c;
#pragma unroll
    for (int first = 0; first < kMost; first += kAtOnce) {
      Eight ws[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        ws[i] = *reinterpret_cast<const Eight*>(weights + int64_t{min(first + i, args.actions - 1)} * args.channels);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int e = 0; e < 8; ++e) sums[first + i] = fmaf(widen(xs.data[e]), widen(ws[i].data[e]), sums[first + i]);
    }
  }
  const float sum = sum_of_lane(sums);
  if (lane >= args.actions) return;
  const float action = sum + widen(static_cast<const S*>(args.bias)[lane]);
  const int64_t at = row * args.actions + lane;
  if (args.float_out)
    static_cast<float*>(args.out)[at] = action;
  else
    static_cast<T*>(args.out)[at] = narrow<T>(action);
}

// Calls `f(TypeTag<T>, TypeTag<S>)`: the rows' type, and that of an input, float32 or the same.
template <class F>
cudaError_t dispatch_types(DType rows, DType input, F&& f) {
  const auto with = [&](auto tag) {
    if (input == rows) return f(tag, tag);
    return input == DType::kFloat32 ? f(tag, TypeTag<float>{}) : cudaErrorInvalidValue;
  };
  return dispatch_to_32_bits(rows, with);
}

unsigned blocks_for(int64_t elements) { return grid_for(std::min(elements, kMaxBlocks * kThreads), kThreads); }

}  // namespace

cudaError_t prepare(const Inputs& inputs, cudaStream_t stream) {
  return dispatch_types(inputs.dtype, inputs.sample_dtype, [&](auto rows, auto input) {
    using T = typename decltype(rows)::type;
    using S = typename decltype(input)::type;
    const int64_t elements =
        inputs.rows * inputs.action_width + inputs.times * inputs.step_width + inputs.film_batch * inputs.film_rows / 8;
    return launch_dependent(prepare_kernel<T, S>, blocks_for(elements), kThreads, stream, inputs);
  });
}

cudaError_t condition(const Condition& condition, cudaStream_t stream) {
  const DType second = condition.second ? condition.second_dtype : condition.dtype;
  return dispatch_types(condition.dtype, second, [&](auto rows, auto input) {
    using T = typename decltype(rows)::type;
    using S = typename decltype(input)::type;
    return launch_dependent(condition_kernel<T, S>, blocks_for(condition.batch * condition.width), kThreads, stream,
                            condition);
  });
}

cudaError_t to_actions(const Actions& actions, cudaStream_t stream) {
  return dispatch_types(actions.dtype, actions.bias_dtype, [&](auto rows, auto input) {
    using T = typename decltype(rows)::type;
    using S = typename decltype(input)::type;
    static_assert(kMaxActions == 32, "an action a lane");
    const auto kernel = actions.actions <= 8    ? actions_kernel<T, S, 8>
                        : actions.actions <= 16 ? actions_kernel<T, S, 16>
                                                : actions_kernel<T, S, 32>;
    return launch_dependent(kernel, grid_for(actions.rows, kThreads / 32), kThreads, stream, actions);
  });
}

}  // namespace dpa::kernels::unet1d_batch
