// What `denoise` and `scheduler_step` share: their check, their prepared inputs, their loops over elements on the CPU.
// The two differ in the scalar formula (kernels/math/diffusion_step.h) and in the names of their arguments.
#pragma once
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/math/diffusion_step.h"
#include "ops/common/check.h"

namespace dpa {

/// Gradients of model_output, sample, table and noise; undefined where the mask is false.
using StepGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using StepMask = std::array<bool, 4>;

/// The names by which an op's users know its table, index and noise.
struct StepNames {
  const char *op, *table, *index, *noise;
  int64_t columns;
  bool flat_table;  // (rows * columns) is accepted beside (rows, columns)
};

void check_step(const StepNames& names, const Tensor& model_output, const Tensor& sample, const Tensor& table,
                const Tensor& index, const OptionalTensor& noise);

/// The op's arguments as the kernels want them: contiguous, table in the dtype of the arithmetic, index in 64 bits.
struct StepInputs {
  Tensor model_output, sample, table, index, noise;
  int64_t batch, inner, rows;

  /// From arguments that have passed their check.
  StepInputs(const Tensor& model_output, const Tensor& sample, const Tensor& table, const Tensor& index,
             const OptionalTensor& noise, int64_t columns);
};

/// Pieces of neighbouring elements that share a row of the table, the same whatever the number of threads.
struct StepPieces {
  static constexpr int64_t kElements = 8192;
  int64_t inner, per_row, count;

  explicit StepPieces(const StepInputs& in)
      : inner(in.inner), per_row((in.inner + kElements - 1) / kElements), count(in.batch * per_row) {}
};

/// Calls f(begin, end, piece, formula) for every piece, in parallel, with the formula of its row.
template <class T, template <class> class Formula, class F>
void for_each_piece(const StepInputs& in, double clip, const F& f) {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const StepPieces pieces(in);
  const A* table = in.table.const_data_ptr<A>();
  const int64_t* index = in.index.const_data_ptr<int64_t>();
  const int64_t grain = std::max<int64_t>(1, 2 * StepPieces::kElements / std::max<int64_t>(1, in.inner));
  at::parallel_for(0, pieces.count, grain, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) {
      const int64_t row = piece / pieces.per_row, begin = piece % pieces.per_row * StepPieces::kElements;
      const int64_t end = std::min(begin + StepPieces::kElements, in.inner);
      const Formula<A> formula(table, index[row], static_cast<A>(clip), in.noise.defined());
      f(row * in.inner + begin, row * in.inner + end, piece, formula);
    }
  });
}

template <template <class> class Formula>
Tensor step_cpu(const StepNames& names, const StepInputs& in, double clip) {
  check_row_range(names.op, names.index, in.index, in.rows);
  auto out = at::empty_like(in.sample);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, in.sample.scalar_type(), "dpa::step", [&] {
    using A = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const auto* output = in.model_output.const_data_ptr<scalar_t>();
    const auto* sample = in.sample.const_data_ptr<scalar_t>();
    const auto* noise = in.noise.defined() ? in.noise.const_data_ptr<scalar_t>() : nullptr;
    auto* result = out.mutable_data_ptr<scalar_t>();
    for_each_piece<scalar_t, Formula>(in, clip, [&](int64_t begin, int64_t end, int64_t, const Formula<A>& formula) {
      for (int64_t i = begin; i < end; ++i)
        result[i] = static_cast<scalar_t>(formula.step(output[i], sample[i], noise ? A(noise[i]) : A(0)));
    });
  });
  return out;
}

template <template <class> class Formula>
StepGradients step_backward_cpu(const StepNames& names, const StepInputs& in, double clip, const Tensor& grad_,
                                const Tensor& table, const StepMask& mask) {
  check_row_range(names.op, names.index, in.index, in.rows);
  const auto grad = grad_.contiguous();
  const auto like = [&](bool wanted) { return wanted ? at::empty_like(in.sample) : Tensor(); };
  auto grad_output = like(mask[0]), grad_sample = like(mask[1]), grad_noise = like(mask[3]);
  Tensor grad_table;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, in.sample.scalar_type(), "dpa::step", [&] {
    using A = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    constexpr int kColumns = Formula<A>::kColumns;
    const auto read = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<scalar_t>() : nullptr; };
    const auto write = [](const Tensor& t) { return t.defined() ? t.mutable_data_ptr<scalar_t>() : nullptr; };
    const auto *g = read(grad), *output = read(in.model_output), *sample = read(in.sample), *noise = read(in.noise);
    auto *to_output = write(grad_output), *to_sample = write(grad_sample), *to_noise = write(grad_noise);
    const StepPieces pieces(in);
    auto sums = mask[2] ? at::empty({in.batch, pieces.per_row, kColumns}, in.table.options()) : Tensor();
    A* to_sums = mask[2] ? sums.template mutable_data_ptr<A>() : nullptr;
    for_each_piece<scalar_t, Formula>(
        in, clip, [&](int64_t begin, int64_t end, int64_t piece, const Formula<A> formula) {
          const auto at = [&](int64_t i) {
            return formula.gradient(g[i], output[i], sample[i], noise ? A(noise[i]) : A(0));
          };
          // A loop for each that is wanted: what the others need is then left out.
          const auto fill = [&](scalar_t* to, auto part) {
            for (int64_t i = begin; to && i < end; ++i) to[i] = static_cast<scalar_t>(part(at(i)));
          };
          fill(to_output, [](const auto& d) { return d.model_output; });
          fill(to_sample, [](const auto& d) { return d.sample; });
          fill(to_noise, [](const auto& d) { return d.noise; });
          if (!to_sums) return;
          A sum[kColumns] = {};
          for (int64_t i = begin; i < end; ++i) {
            const auto d = at(i);
            for (int c = 0; c < kColumns; ++c) sum[c] += d.row[c];
          }
          std::copy_n(sum, kColumns, to_sums + piece * kColumns);
        });
    if (mask[2])
      grad_table = at::zeros({in.rows, kColumns}, in.table.options())
                       .index_add_(0, in.index, sums.sum(1))
                       .to(table.scalar_type())
                       .view(table.sizes());
  });
  return {grad_output, grad_sample, grad_table, grad_noise};
}

}  // namespace dpa
