#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include "ops/adamw_ema/adamw_ema.h"

namespace dpa {
namespace {

/// Whether elements of the same index lie at the same distance from the first one.
bool same_order(const Tensor& a, const Tensor& b) {
  for (int64_t d = 0; d < a.dim(); d++)
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  return true;
}

}  // namespace

InOneOrder::InOneOrder(const AdamWEmaArguments& in) : in_(in) {
  // Before anything is written: elements that share memory have no update of their own.
  for (const auto list : {in.params, in.exp_avgs, in.exp_avg_sqs, in.averages})
    for (const Tensor& tensor : list)
      DPA_CHECK(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, "adamw_ema_",
                "tensors that are written must have a place for each element", "strides ", tensor.strides());
  for (size_t i = 0; i < in.params.size(); i++) {
    const Tensor& param = in.params[i];
    const Tensor like =
        param.is_non_overlapping_and_dense() ? param : at::empty_like(param, at::MemoryFormat::Contiguous);
    members_.push_back({ordered(param, like), Tensor(), ordered(in.exp_avgs[i], like), ordered(in.exp_avg_sqs[i], like),
                        in.averages.empty() ? Tensor() : ordered(in.averages[i], like)});
    const Tensor& grad = in.grads[i];
    members_.back().grad =
        same_order(grad, like) ? grad : at::empty_strided(like.sizes(), like.strides(), grad.options()).copy_(grad);
  }
}

Tensor InOneOrder::ordered(const Tensor& tensor, const Tensor& like) {
  if (same_order(tensor, like)) return tensor;
  const Tensor copy = at::empty_strided(like.sizes(), like.strides(), tensor.options()).copy_(tensor);
  copies_.push_back({copy, tensor});
  return copy;
}

void InOneOrder::finish() const {
  for (const auto& [copy, tensor] : copies_) tensor.copy_(copy);
  if (in_.clear_grads)
    for (size_t i = 0; i < members_.size(); i++)
      if (!members_[i].grad.is_same(in_.grads[i])) in_.grads[i].zero_();
  const auto changed = [](at::TensorList list) {
    for (const Tensor& tensor : list)
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  };
  for (const auto list : {in_.params, in_.exp_avgs, in_.exp_avg_sqs, in_.averages, in_.state_steps}) changed(list);
  if (in_.clear_grads) changed(in_.grads);
}

}  // namespace dpa
