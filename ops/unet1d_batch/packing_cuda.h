// The packed weights of `dpa::unet1d_batch`, made on a GPU.
#pragma once
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/plans/conv1d/changes.h"
#include "ops/common/cuda.h"
#include "ops/conv1d/gemm.h"
#include "ops/unet1d_batch/unet1d_batch.h"

namespace dpa::unet1d_batch {

/// Packs all weights in float32: those of GEMMs as planes of high halves, then of low ones.
inline void pack_in_halves(const BatchPlan& plan, at::TensorList parameters, const Tensor& out) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  for (const auto& item : plan.items) {
    const auto weight = parameters[item.parameter].contiguous();
    const int64_t count = item.taps * item.d0;
    const auto to = out.narrow(0, item.offset, count * item.width);
    const auto between = item.operand_size > 0 ? at::empty_like(to) : to;
    gemm::Packings packings{};
    packings.each[packings.count++] = {
        weight.const_data_ptr(), between.mutable_data_ptr(), item.d0, item.d1, item.taps, item.width};
    C10_CUDA_CHECK(gemm::pack_weights(kernels::DType::kFloat32, kernels::DType::kFloat32, packings, stream));
    if (item.operand_size == 0) continue;
    auto* const high = static_cast<uint16_t*>(out.mutable_data_ptr()) + 2 * item.operand + item.offset - item.operand;
    C10_CUDA_CHECK(
        gemm::split_weights(between.const_data_ptr(), count, item.width, high, high + item.operand_size, stream));
  }
}

/// Packs all weights, or those that have changed as far as `seen` tells.
inline void pack_batch_weights(const BatchPlan& plan, at::TensorList parameters, const Tensor& seen,
                               const Tensor& out) {
  if (parameters[0].numel() == 0) return;
  if (out.scalar_type() == at::kFloat) return pack_in_halves(plan, parameters, out);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto source = kernel_dtype(parameters[0].scalar_type()), target = kernel_dtype(out.scalar_type());
  const auto wanted = seen.defined() ? at::empty({static_cast<int64_t>(plan.items.size())}, seen.options()) : Tensor();
  std::vector<Tensor> kept;
  for (size_t first = 0; first < plan.items.size(); first += gemm::kMaxPackings) {
    gemm::Packings packings{};
    const size_t end = std::min(plan.items.size(), first + gemm::kMaxPackings);
    for (size_t i = first; i < end; ++i) {
      const auto& item = plan.items[i];
      kept.push_back(parameters[item.parameter].contiguous());
      packings.each[packings.count++] = {kept.back().const_data_ptr(),
                                         static_cast<uint16_t*>(out.mutable_data_ptr()) + item.offset,
                                         item.d0,
                                         item.d1,
                                         item.taps,
                                         item.width};
    }
    if (seen.defined()) {
      auto* const samples = static_cast<uint32_t*>(seen.mutable_data_ptr()) + first * gemm::ComparedElements::kMost;
      auto* const changed = wanted.mutable_data_ptr<int>() + first;
      C10_CUDA_CHECK(gemm::detect_changes(source, packings, samples, changed, stream));
      packings.wanted = changed;
    }
    C10_CUDA_CHECK(gemm::pack_weights(source, target, packings, stream));
  }
}

}  // namespace dpa::unet1d_batch
