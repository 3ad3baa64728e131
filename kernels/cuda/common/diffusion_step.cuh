// The kernels of `denoise` and `scheduler_step`, which differ in the scalar formula alone (kernels/math).
//
// step, step_gradient: one thread an element, striding over the grid. Neighbouring threads read neighbouring elements;
//   the table's row is a broadcast from the cache.
// table_gradient: one block a row of the table. It walks over the samples that use the row and sums each column over
//   their elements, in an order that depends on the sizes alone, so the result is the same every time; rows that nobody
//   uses get zeros.
#pragma once
#include "kernels/cuda/common/diffusion_step.h"
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/reduce.cuh"
#include "kernels/math/diffusion_step.h"

namespace dpa::kernels {

constexpr int kStepThreads = 256;

template <class T, template <class> class Formula>
__global__ void step(DiffusionStep args) {
  using A = Accumulate<T>;
  const auto* output = static_cast<const T*>(args.model_output);
  const auto* sample = static_cast<const T*>(args.sample);
  const auto* noise = static_cast<const T*>(args.noise);
  const auto* table = static_cast<const A*>(args.table);
  auto* out = static_cast<T*>(args.out);
  const int64_t count = args.batch * args.inner, stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const int64_t row = args.index[args.batch == 1 ? 0 : i / args.inner];
    A value = A(NAN);
    if (row >= 0 && row < args.rows) {
      const Formula<A> formula(table, row, static_cast<A>(args.clip), noise != nullptr);
      value = formula.step(widen(output[i]), widen(sample[i]), noise ? widen(noise[i]) : A(0));
    }
    out[i] = narrow<T>(value);
  }
}

template <class T, template <class> class Formula>
__global__ void step_gradient(DiffusionStepBackward args) {
  using A = Accumulate<T>;
  const DiffusionStep& forward = args.forward;
  const auto* output = static_cast<const T*>(forward.model_output);
  const auto* sample = static_cast<const T*>(forward.sample);
  const auto* noise = static_cast<const T*>(forward.noise);
  const auto* table = static_cast<const A*>(forward.table);
  const auto* grad = static_cast<const T*>(args.grad);
  auto* grad_output = static_cast<T*>(args.grad_model_output);
  auto* grad_sample = static_cast<T*>(args.grad_sample);
  auto* grad_noise = static_cast<T*>(args.grad_noise);
  const int64_t count = forward.batch * forward.inner, stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const int64_t row = forward.index[forward.batch == 1 ? 0 : i / forward.inner];
    math::StepGradient<A, Formula<A>::kColumns> g;
    g.model_output = g.sample = g.noise = A(NAN);
    if (row >= 0 && row < forward.rows) {
      const Formula<A> formula(table, row, static_cast<A>(forward.clip), noise != nullptr);
      g = formula.gradient(widen(grad[i]), widen(output[i]), widen(sample[i]), noise ? widen(noise[i]) : A(0));
    }
    if (grad_output) grad_output[i] = narrow<T>(g.model_output);
    if (grad_sample) grad_sample[i] = narrow<T>(g.sample);
    if (grad_noise) grad_noise[i] = narrow<T>(g.noise);
  }
}

template <class T, template <class> class Formula>
__global__ void table_gradient(DiffusionStepBackward args) {
  using A = Accumulate<T>;
  constexpr int kColumns = Formula<A>::kColumns;
  __shared__ A scratch[kStepThreads / kWarpSize];
  const DiffusionStep& forward = args.forward;
  const auto* output = static_cast<const T*>(forward.model_output);
  const auto* sample = static_cast<const T*>(forward.sample);
  const auto* noise = static_cast<const T*>(forward.noise);
  const auto* grad = static_cast<const T*>(args.grad);
  for (int64_t row = blockIdx.x; row < forward.rows; row += gridDim.x) {
    const Formula<A> formula(static_cast<const A*>(forward.table), row, static_cast<A>(forward.clip), noise != nullptr);
    A sums[kColumns] = {};
    for (int64_t b = 0; b < forward.batch; ++b) {
      if (forward.index[b] != row) continue;
      for (int64_t i = b * forward.inner + threadIdx.x; i < (b + 1) * forward.inner; i += blockDim.x) {
        const auto g =
            formula.gradient(widen(grad[i]), widen(output[i]), widen(sample[i]), noise ? widen(noise[i]) : A(0));
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sums[c] += g.row[c];
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const A sum = block_sum(sums[c], scratch);
      if (threadIdx.x == 0) static_cast<A*>(args.grad_table)[row * kColumns + c] = sum;
    }
  }
}

template <template <class> class Formula>
cudaError_t launch_step(const DiffusionStep& args, cudaStream_t stream) {
  return dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch(step<T, Formula>, grid_for(args.batch * args.inner, kStepThreads), kStepThreads, stream, args);
  });
}

template <template <class> class Formula>
cudaError_t launch_step_backward(const DiffusionStepBackward& args, cudaStream_t stream) {
  return dispatch(args.forward.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const unsigned blocks = grid_for(args.forward.batch * args.forward.inner, kStepThreads);
    cudaError_t error = cudaSuccess;
    if (args.grad_model_output || args.grad_sample || args.grad_noise)
      error = launch(step_gradient<T, Formula>, blocks, kStepThreads, stream, args);
    if (error == cudaSuccess && args.grad_table)
      error = launch(table_gradient<T, Formula>, grid_for(args.forward.rows, 1), kStepThreads, stream, args);
    return error;
  });
}

}  // namespace dpa::kernels
