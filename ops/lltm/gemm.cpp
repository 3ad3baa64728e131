// The GEMMs of the cell at sizes where a library's are faster.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "kernels/cpu/kernels.h"
#include "ops/lltm/lltm.h"

namespace dpa {
namespace {

namespace cpu = kernels::cpu;

/// x @ weights^T of 16 bits on the CPU. PyTorch's GEMM would round the sums to 16 bits.
Tensor gemm_of_16_bits(const Tensor& x_, const Tensor& weights_) {
  std::string error;
  const auto& level = cpu::choose_kernels(error);
  TORCH_CHECK(error.empty(), "dpa::lltm: ", error);
  if (x_.scalar_type() != at::kBFloat16 || !level.pairs) return at::mm(x_.to(at::kFloat), weights_.t().to(at::kFloat));

  const auto x = x_.contiguous(), weights = weights_.contiguous();
  auto out = at::empty({x.size(0), weights.size(0)}, x.options().dtype(at::kFloat));
  const cpu::Pairs pairs = {static_cast<const uint16_t*>(weights.const_data_ptr()),
                            static_cast<const uint16_t*>(x.const_data_ptr()),
                            out.mutable_data_ptr<float>(),
                            x.size(0),
                            weights.size(0),
                            x.size(1)};
  const int64_t task_size = std::max<int64_t>(1, cpu::kDenseRows * x.numel());
  at::parallel_for(0, cpu::pairs_tasks(pairs), std::max<int64_t>(1, (1 << 20) / task_size),
                   [&](int64_t begin, int64_t end) { level.pairs(pairs, begin, end); });
  return out;
}

}  // namespace

Tensor lltm_gemm(const Tensor& x, const Tensor& weights) {
  const auto type = accumulate_type(x.scalar_type());
  if (x.scalar_type() == type) return at::mm(x, weights.t());
  // A GPU keeps the 16-bit operands and rounds nothing on the way out.
  return x.is_cuda() ? at::mm(x, weights.t(), type) : gemm_of_16_bits(x, weights);
}

LltmGemmGradients lltm_gemm_gradients(const Tensor& grad_gates, const Tensor& x, const Tensor& weights, int64_t state,
                                      LltmMask mask) {
  const auto grad = grad_gates.to(weights.scalar_type());
  LltmGemmGradients result;
  if (mask[0] && mask[3])
    result.x = at::mm(grad, weights);  // one GEMM fills the chip better than two
  else if (mask[0])
    result.input = at::mm(grad, weights.slice(1, state));
  else if (mask[3])
    result.old_h = at::mm(grad, weights.slice(1, 0, state));
  if (mask[1]) result.weights = at::mm(grad.t(), x);
  return result;
}

}  // namespace dpa
