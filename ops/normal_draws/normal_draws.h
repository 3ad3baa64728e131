// `dpa::normal_draws`: as many tensors of normal random numbers as wanted, one after the other from a generator's stream.
//
//   out[d] = what the d-th call of torch.randn(like.shape, generator=generator) gives, d < draws; 0 for draws <= d <
//   rows
//
// On CUDA one launch makes them all, where a draw has few numbers. Not differentiable: the numbers depend on nothing.
//
// `dpa::loop_inputs_`: what a captured loop reads, written before it runs: random numbers into `out`, and `given[i]` into
// `kept[i]`, whose shape it has. On CUDA one launch too, where types are the same and memory is contiguous.
#pragma once
#include <ATen/core/Generator.h>

#include "ops/common/check.h"

namespace dpa {

using OptionalGenerator = std::optional<at::Generator>;

/// Of the functional form `like` gives a draw's shape, dtype and device; its values are not read. Of the other, `out`
/// has a row a draw.
void check_normal_draws(const Tensor& like, const c10::SymInt& draws, const c10::SymInt& rows);
void check_normal_draws_out(const Tensor& out, const c10::SymInt& draws);

/// Of `loop_inputs_`.
void check_loop_inputs(at::TensorList kept, at::TensorList given, const Tensor& out, int64_t draws);

/// Writes rows of `out` one after the other.
void normal_draws_each(Tensor out, int64_t draws, const OptionalGenerator& generator);

/// The output for `like` and `rows`, not yet written.
Tensor normal_draws_empty(const Tensor& like, int64_t rows);

}  // namespace dpa
