#include "ops/common/cuda.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/cuda/parallel_sweep/parallel_sweep.h"
#include "ops/parallel_sweep/parallel_sweep.h"

namespace dpa {
namespace {

std::tuple<Tensor, Tensor> parallel_window_cuda(const Tensor& states, const Tensor& table, const Tensor& position,
                                                int64_t window) {
  check_parallel_window(states, table, position, window);
  const c10::cuda::CUDAGuard guard(states.device());
  auto sizes = states.sizes().vec();
  sizes[0] = window;
  auto samples = at::empty(sizes, states.options()), rows = at::empty({window, table.size(1)}, table.options());
  C10_CUDA_CHECK(kernels::parallel_window(
      {states.const_data_ptr<float>(), table.const_data_ptr<float>(), position.const_data_ptr<int64_t>(), window,
       samples.numel() / window, table.size(1), std::min(states.size(0), table.size(0)) - window,
       samples.mutable_data_ptr<float>(), rows.mutable_data_ptr<float>()},
      c10::cuda::getCurrentCUDAStream()));
  return {samples, rows};
}

void parallel_move_cuda(const Tensor& states, const Tensor& position, const Tensor& residual, const Tensor& output,
                        const Tensor& coefficients, const OptionalTensor& noise, const OptionalTensor& known,
                        const OptionalTensor& known_mask, int64_t steps, double clip, double tolerance) {
  check_parallel_move({states, position, residual, output, coefficients, value_or_undefined(noise),
                       value_or_undefined(known), value_or_undefined(known_mask), steps, clip, tolerance});
  const c10::cuda::CUDAGuard guard(states.device());
  const auto plain = [](const OptionalTensor& t) { return t.has_value() ? t->contiguous() : Tensor(); };
  const Tensor out = output.contiguous(), table = coefficients.contiguous(), noises = plain(noise),
               values = plain(known), mask = plain(known_mask);
  kernels::ParallelMove args = {};
  args.states = states.mutable_data_ptr<float>();
  args.position = position.mutable_data_ptr<int64_t>();
  args.residual = residual.mutable_data_ptr<float>();
  args.output = out.const_data_ptr<float>();
  args.coefficients = table.const_data_ptr<float>();
  args.noise = static_cast<const float*>(data_or_null(noises));
  args.condition_data = static_cast<const float*>(data_or_null(values));
  args.condition_mask = static_cast<const uint8_t*>(data_or_null(mask));
  args.steps = steps, args.window = output.size(0), args.batch = output.size(1);
  args.inner = output.size(2) * output.size(3);
  const auto squares = at::empty({args.batch * kernels::moved_parts(args.inner), args.window}, states.options());
  args.squares = squares.mutable_data_ptr<float>();
  args.clip = static_cast<float>(clip), args.tolerance = static_cast<float>(tolerance);
  C10_CUDA_CHECK(kernels::parallel_move(args, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("parallel_window", &parallel_window_cuda);
  m.impl("parallel_move_", &parallel_move_cuda);
}

}  // namespace dpa
