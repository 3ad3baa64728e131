// `dpa::adamw_ema_`: a step of AdamW on many tensors, in place, and the moving averages of the parameters that it makes.
//
//   g = +-grads / grad_scale * clip_coef,  state_steps += 1
//   params *= 1 - lr weight_decay                          (where it is not decoupled: g += weight_decay params)
//   exp_avgs = beta1 exp_avgs + (1 - beta1) g,             exp_avg_sqs = beta2 exp_avg_sqs + (1 - beta2) g^2
//   params -= lr / (1 - beta1^step) exp_avgs / (sqrt(exp_avg_sqs / (1 - beta2^step)) + eps)
//   averages = decay averages + (1 - decay) params,        decay by ema_schedule, as dpa.training.EMA after `updates`
//
// found_inf other than 0: the averages alone move. dpa.training.AdamW calls it. Nothing is differentiable.
#pragma once
#include <array>
#include <vector>

#include "kernels/math/adamw.h"
#include "ops/common/check.h"

namespace dpa {

/// The op's arguments; absent tensors are undefined.
struct AdamWEmaArguments {
  at::TensorList params, grads, exp_avgs, exp_avg_sqs, averages, state_steps;
  double lr, beta1, beta2, weight_decay, eps;
  bool decoupled_weight_decay, maximize, clear_grads;
  Tensor tensor_lr, grad_scale, found_inf, clip_coef, updates;
  c10::ArrayRef<double> ema_schedule;

  math::EmaSchedule schedule() const {
    if (averages.empty()) return {};
    return {ema_schedule[0], ema_schedule[1], ema_schedule[2], ema_schedule[3]};
  }
};

void check_adamw_ema(const AdamWEmaArguments& in);

/// The op's kernel of a backend: checks, and runs on what passes, unless there is nothing.
template <void (*Run)(const AdamWEmaArguments&)>
void adamw_ema_kernel(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                      at::TensorList averages, at::TensorList state_steps, double lr, double beta1, double beta2,
                      double weight_decay, double eps, bool decoupled_weight_decay, bool maximize, bool clear_grads,
                      const OptionalTensor& tensor_lr, const OptionalTensor& grad_scale,
                      const OptionalTensor& found_inf, const OptionalTensor& clip_coef, const OptionalTensor& updates,
                      c10::ArrayRef<double> ema_schedule) {
  const AdamWEmaArguments in = {params,
                                grads,
                                exp_avgs,
                                exp_avg_sqs,
                                averages,
                                state_steps,
                                lr,
                                beta1,
                                beta2,
                                weight_decay,
                                eps,
                                decoupled_weight_decay,
                                maximize,
                                clear_grads,
                                value_or_undefined(tensor_lr),
                                value_or_undefined(grad_scale),
                                value_or_undefined(found_inf),
                                value_or_undefined(clip_coef),
                                value_or_undefined(updates),
                                ema_schedule};
  check_adamw_ema(in);
  if (!params.empty()) Run(in);
}

/// Each parameter and what belongs to it in one order in memory, that of the parameter where it has no gaps. What lies
/// otherwise is copied, and copied back by `finish`.
class InOneOrder {
 public:
  struct Member {
    Tensor param, grad, exp_avg, exp_avg_sq, average;
  };

  explicit InOneOrder(const AdamWEmaArguments& in);
  const std::vector<Member>& members() const { return members_; }
  /// Writes copies back, and tells autograd which tensors have changed.
  void finish() const;

 private:
  Tensor ordered(const Tensor& tensor, const Tensor& like);

  const AdamWEmaArguments& in_;
  std::vector<Member> members_;
  std::vector<std::array<Tensor, 2>> copies_;  // a copy, and where it belongs
};

}  // namespace dpa
