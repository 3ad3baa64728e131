#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "ops/adamw_ema/adamw_ema.h"
#include "ops/common/convert.h"
#include "ops/common/vectorize.h"

namespace dpa {
namespace {

constexpr int64_t kElementsPerThread = 1 << 15;  // elements a thread takes at least

/// The type of arithmetic on stored values of type `T`: float for 16-bit types.
template <class T>
using Arithmetic = decltype(widen(T()));

/// What the elements of a tensor have in common.
template <class A>
struct StepOfTensor {
  math::AdamW<A> step;
  A scale, clip, sign, average_weight;
  bool skip, average, clear;
};

template <class P, class G>
struct Places {
  P *param, *exp_avg, *exp_avg_sq;
  G* grad;
  Arithmetic<P>* average;
};

/// Elements [begin, end). Flags of the whole call are arguments of the template, so that the loop has no branch.
template <bool kSkip, bool kAverage, class P, class G, class A>
DPA_VECTORIZE void update_elements(const Places<P, G> at, const StepOfTensor<A> s, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    A param = widen(at.param[i]);
    if constexpr (!kSkip) {
      A exp_avg = widen(at.exp_avg[i]), exp_avg_sq = widen(at.exp_avg_sq[i]);
      s.step.move(param, s.sign * (widen(at.grad[i]) / s.scale * s.clip), exp_avg, exp_avg_sq);
      narrow(param, at.param[i]);
      narrow(exp_avg, at.exp_avg[i]);
      narrow(exp_avg_sq, at.exp_avg_sq[i]);
    }
    // Of the stored parameter, as an average that is made afterwards.
    if constexpr (kAverage) at.average[i] = math::lerp<A>(at.average[i], widen(at.param[i]), s.average_weight);
  }
}

double number_or(const Tensor& tensor, double otherwise) {
  return tensor.defined() ? tensor.item<double>() : otherwise;
}

template <class A>
StepOfTensor<A> step_of_tensor(const AdamWEmaArguments& in, const Tensor& step) {
  StepOfTensor<A> s = {};
  s.skip = number_or(in.found_inf, 0) != 0;
  if (!s.skip) *step.mutable_data_ptr<float>() += 1;
  const double count = *step.const_data_ptr<float>();
  s.step.lr = static_cast<A>(number_or(in.tensor_lr, in.lr));
  s.step.beta1 = static_cast<A>(in.beta1), s.step.beta2 = static_cast<A>(in.beta2);
  s.step.rest1 = static_cast<A>(1 - in.beta1), s.step.rest2 = static_cast<A>(1 - in.beta2);
  s.step.weight_decay = static_cast<A>(in.weight_decay), s.step.eps = static_cast<A>(in.eps);
  s.step.step_size = static_cast<A>(number_or(in.tensor_lr, in.lr) / (1 - std::pow(in.beta1, count)));
  s.step.correction2_sqrt = static_cast<A>(std::sqrt(1 - std::pow(in.beta2, count)));
  s.step.decoupled = in.decoupled_weight_decay;
  s.scale = static_cast<A>(number_or(in.grad_scale, 1)), s.clip = static_cast<A>(number_or(in.clip_coef, 1));
  s.sign = in.maximize ? A(-1) : A(1);
  s.average = !in.averages.empty(), s.clear = in.clear_grads;
  if (s.average) s.average_weight = static_cast<A>(in.schedule().weight(number_or(in.updates, 0)));
  return s;
}

template <class P, class G>
void step_on_cpu(const AdamWEmaArguments& in) {
  using A = Arithmetic<P>;
  const InOneOrder order(in);
  for (size_t t = 0; t < order.members().size(); t++) {
    const auto& m = order.members()[t];
    const StepOfTensor<A> s = step_of_tensor<A>(in, in.state_steps[t]);
    const Places<P, G> at = {m.param.mutable_data_ptr<P>(), m.exp_avg.mutable_data_ptr<P>(),
                             m.exp_avg_sq.mutable_data_ptr<P>(), m.grad.mutable_data_ptr<G>(),
                             s.average ? m.average.mutable_data_ptr<A>() : nullptr};
    at::parallel_for(0, m.param.numel(), kElementsPerThread, [&](int64_t begin, int64_t end) {
      const auto part =
          s.average ? (s.skip ? &update_elements<true, true, P, G, A> : &update_elements<false, true, P, G, A>)
                    : (s.skip ? &update_elements<true, false, P, G, A> : &update_elements<false, false, P, G, A>);
      part(at, s, begin, end);
      if (s.clear) std::fill(at.grad + begin, at.grad + end, G(0));
    });
  }
  order.finish();
}

void adamw_ema_cpu(const AdamWEmaArguments& in) {
  const auto type = in.params[0].scalar_type(), grad_type = in.grads[0].scalar_type();
  if (type == at::kFloat && grad_type == at::kHalf) return step_on_cpu<float, c10::Half>(in);
  if (type == at::kFloat && grad_type == at::kBFloat16) return step_on_cpu<float, c10::BFloat16>(in);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, "adamw_ema_",
                                  [&] { step_on_cpu<scalar_t, scalar_t>(in); });
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) { m.impl("adamw_ema_", &adamw_ema_kernel<&adamw_ema_cpu>); }

}  // namespace dpa
