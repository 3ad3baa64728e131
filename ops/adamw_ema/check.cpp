#include "ops/adamw_ema/adamw_ema.h"

namespace dpa {
namespace {

constexpr const char* kAdamWEma = "adamw_ema_";

/// `list` has a tensor a parameter, of its shape and device, and of `type`.
void check_list(const char* name, at::TensorList list, const AdamWEmaArguments& in, at::ScalarType type) {
  DPA_CHECK(list.size() == in.params.size(), kAdamWEma,
            c10::str(name, " must be as many tensors as params (", in.params.size(), ")"), list.size());
  for (size_t i = 0; i < list.size(); i++) {
    check_same_device(kAdamWEma, name, list[i], "params", in.params[0]);
    DPA_CHECK(list[i].scalar_type() == type, kAdamWEma, c10::str(name, " must have dtype ", type),
              list[i].scalar_type());
    DPA_CHECK(list[i].sym_sizes() == in.params[i].sym_sizes(), kAdamWEma,
              c10::str(name, " must have the shape of params (", in.params[i].sym_sizes(), ")"), list[i].sym_sizes());
  }
}

/// One number on the device of the parameters, or none.
void check_number(const char* name, const Tensor& tensor, const AdamWEmaArguments& in, at::ScalarType type) {
  if (!tensor.defined()) return;
  check_same_device(kAdamWEma, name, tensor, "params", in.params[0]);
  DPA_CHECK(tensor.scalar_type() == type && tensor.sym_numel() == 1, kAdamWEma, c10::str(name, " must be one ", type),
            tensor.scalar_type(), " ", tensor.sym_sizes());
}

void check_schedule(const AdamWEmaArguments& in) {
  DPA_CHECK(in.updates.defined(), kAdamWEma, "updates must be given where there are averages", "none");
  check_number("updates", in.updates, in, at::kLong);
  DPA_CHECK(in.ema_schedule.size() == 4, kAdamWEma,
            "ema_schedule must be power, inv_gamma, min_decay, max_decay where there are averages", in.ema_schedule);
  const auto s = in.schedule();
  DPA_CHECK(s.power >= 0 && s.inv_gamma > 0 && 0 <= s.min_decay && s.min_decay <= s.max_decay && s.max_decay <= 1,
            kAdamWEma, "ema_schedule must have power >= 0, inv_gamma > 0 and 0 <= min_decay <= max_decay <= 1",
            in.ema_schedule);
}

}  // namespace

void check_adamw_ema(const AdamWEmaArguments& in) {
  DPA_CHECK(0 <= in.beta1 && in.beta1 < 1, kAdamWEma, "beta1 must be in [0, 1)", in.beta1);
  DPA_CHECK(0 <= in.beta2 && in.beta2 < 1, kAdamWEma, "beta2 must be in [0, 1)", in.beta2);
  DPA_CHECK(in.eps >= 0, kAdamWEma, "eps must be at least 0", in.eps);
  DPA_CHECK(in.weight_decay >= 0, kAdamWEma, "weight_decay must be at least 0", in.weight_decay);
  const Tensor param = in.params.empty() ? Tensor() : in.params[0];
  const auto type = param.defined() ? param.scalar_type() : at::kFloat, wide = accumulate_type(type);
  if (param.defined()) check_floating(kAdamWEma, "params", param);
  check_list("params", in.params, in, type);
  const auto grad_type = in.grads.empty() ? type : in.grads[0].scalar_type();
  const bool half = grad_type == at::kHalf || grad_type == at::kBFloat16;
  DPA_CHECK(grad_type == type || (half && type == at::kFloat), kAdamWEma,
            c10::str("grads must have the dtype of params (", type, "), or 16 bits beside float32"), grad_type);
  check_list("grads", in.grads, in, grad_type);
  check_list("exp_avgs", in.exp_avgs, in, type);
  check_list("exp_avg_sqs", in.exp_avg_sqs, in, type);
  if (!in.averages.empty()) check_list("averages", in.averages, in, wide);
  if (!in.averages.empty()) check_schedule(in);
  DPA_CHECK(in.state_steps.size() == in.params.size(), kAdamWEma,
            c10::str("state_steps must be as many tensors as params (", in.params.size(), ")"), in.state_steps.size());
  for (const Tensor& step : in.state_steps) check_number("state_steps", step, in, at::kFloat);
  if (!param.defined()) return;
  check_number("tensor_lr", in.tensor_lr, in, at::kFloat);
  check_number("grad_scale", in.grad_scale, in, at::kFloat);
  check_number("found_inf", in.found_inf, in, at::kFloat);
  check_number("clip_coef", in.clip_coef, in, wide);
}

}  // namespace dpa
