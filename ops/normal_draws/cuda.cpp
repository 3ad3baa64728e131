#include "ops/common/cuda.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <torch/library.h>

#include <mutex>

#include "kernels/cuda/normal_draws/normal_draws.h"
#include "ops/normal_draws/normal_draws.h"

namespace dpa {
namespace {

at::CUDAGeneratorImpl& source_of(const Tensor& out, const OptionalGenerator& generator) {
  return *at::get_generator_or_default<at::CUDAGeneratorImpl>(
      generator, at::cuda::detail::getDefaultCUDAGenerator(out.device().index()));
}

kernels::PhiloxStream take(at::CUDAGeneratorImpl& generator, int64_t draws) {
  at::PhiloxCudaState state;
  {
    const std::lock_guard<std::mutex> lock(generator.mutex_);
    state = generator.philox_cuda_state(static_cast<uint64_t>(draws * kernels::kDrawOffset));
  }
  if (state.captured_) return {0, state.offset_intragraph_, state.seed_.ptr, state.offset_.ptr};
  return {state.seed_.val, state.offset_.val, nullptr, nullptr};
}

void draw(const Tensor& out, int64_t draws, const OptionalGenerator& generator) {
  const c10::cuda::CUDAGuard guard(out.device());
  const int64_t rows = out.size(0), numel = rows ? out.numel() / rows : 0;
  if (draws == 0 || numel == 0 || numel > kernels::kMostDrawn || out.scalar_type() == at::kDouble)
    return normal_draws_each(out, draws, generator);
  C10_CUDA_CHECK(kernels::normal_draws({out.mutable_data_ptr(), kernel_dtype(out.scalar_type()), draws, rows, numel,
                                        take(source_of(out, generator), draws)},
                                       c10::cuda::getCurrentCUDAStream()));
}

// The copies that the kernel does; the others are done here.
kernels::Copies copies_of(at::TensorList kept, at::TensorList given) {
  kernels::Copies copies = {};
  for (size_t i = 0; i < kept.size(); i++) {
    const bool plain = kept[i].scalar_type() == given[i].scalar_type() && kept[i].device() == given[i].device() &&
                       kept[i].is_contiguous() && given[i].is_contiguous();
    if (plain && kept[i].numel() > 0 && copies.count < kernels::kMostCopies)
      copies.of[copies.count++] = {given[i].const_data_ptr(), kept[i].mutable_data_ptr(),
                                   static_cast<int64_t>(kept[i].nbytes())};
    else
      kept[i].copy_(given[i]);
  }
  return copies;
}

void loop_inputs_cuda(at::TensorList kept, at::TensorList given, const OptionalTensor& out_, int64_t draws,
                      const OptionalGenerator& generator) {
  const Tensor out = value_or_undefined(out_);
  check_loop_inputs(kept, given, out, draws);
  const c10::cuda::CUDAGuard guard(out.defined() ? out.device() : kept[0].device());
  const auto copies = copies_of(kept, given);
  kernels::NormalDraws numbers = {nullptr, kernels::DType::kFloat32, 0, 0, 1, {}};
  if (out.defined()) {
    const int64_t rows = out.size(0), numel = rows ? out.numel() / rows : 0;
    if (draws == 0 || numel == 0 || numel > kernels::kMostDrawn || out.scalar_type() == at::kDouble)
      normal_draws_each(out, draws, generator);
    else
      numbers = {out.mutable_data_ptr(),
                 kernel_dtype(out.scalar_type()),
                 draws,
                 rows,
                 numel,
                 take(source_of(out, generator), draws)};
  }
  C10_CUDA_CHECK(kernels::loop_inputs(numbers, copies, c10::cuda::getCurrentCUDAStream()));
}

Tensor normal_draws_cuda(const Tensor& like, int64_t draws, int64_t rows, const OptionalGenerator& generator) {
  check_normal_draws(like, draws, rows);
  auto out = normal_draws_empty(like, rows);
  draw(out, draws, generator);
  return out;
}

void normal_draws_out_cuda(int64_t draws, const OptionalGenerator& generator, const Tensor& out) {
  check_normal_draws_out(out, draws);
  draw(out, draws, generator);
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("normal_draws", &normal_draws_cuda);
  m.impl("normal_draws.out", &normal_draws_out_cuda);
  m.impl("loop_inputs_", &loop_inputs_cuda);
}

}  // namespace dpa
