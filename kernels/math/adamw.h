// One element of an AdamW step and of a moving average, as functions of scalars, in the order of operations of
// PyTorch's fused kernels, so that results on a GPU have their bits.
#pragma once
#include <cmath>

#include "kernels/math/host_device.h"

namespace dpa::math {

/// a * b + c: rounded once on a GPU, as PyTorch's kernels do. On a CPU twice, for a call to fma there would end a loop's
/// vectors.
template <class A>
DPA_HOST_DEVICE A multiply_add(A a, A b, A c) {
#ifdef __CUDA_ARCH__
  return fma(a, b, c);
#else
  return a * b + c;
#endif
}

/// What the elements of a tensor have in common in a step.
template <class A>
struct AdamW {
  A lr, beta1, beta2, weight_decay, eps;
  A step_size;         // lr / (1 - beta1^step)
  A correction2_sqrt;  // sqrt(1 - beta2^step)
  bool decoupled;      // the decay is of the parameter (AdamW), not part of the gradient (Adam)
  A rest1, rest2;      // 1 - beta1, 1 - beta2, for a CPU

  /// param, exp_avg and exp_avg_sq move by the gradient.
  DPA_HOST_DEVICE void move(A& param, A grad, A& exp_avg, A& exp_avg_sq) const {
    if (weight_decay != A(0)) {
      if (decoupled)
        param = multiply_add(-(lr * weight_decay), param, param);
      else
        grad = multiply_add(param, weight_decay, grad);
    }
#ifdef __CUDA_ARCH__
    const A square = grad * grad;
    exp_avg = fma(beta1, exp_avg, fma(-beta1, grad, grad));
    exp_avg_sq = fma(beta2, exp_avg_sq, fma(-beta2, square, square));
#else
    exp_avg = beta1 * exp_avg + rest1 * grad;
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * grad * grad;
#endif
    param -= step_size * exp_avg / (std::sqrt(exp_avg_sq) / correction2_sqrt + eps);
  }
};

/// `weight` of the way from `start` to `end`, from the nearer one.
template <class A>
DPA_HOST_DEVICE A lerp(A start, A end, A weight) {
  return weight < A(0.5) ? multiply_add(weight, end - start, start) : multiply_add(start - end, A(1) - weight, end);
}

/// How moving averages forget their start (dpa.training.EMA).
struct EmaSchedule {
  double power, inv_gamma, min_decay, max_decay;

  /// 1 - decay of the update after `updates` earlier ones: the parameter's weight.
  DPA_HOST_DEVICE double weight(double updates) const {
    if (updates < 2) return 1.0;
    const double grown = 1.0 - ::pow(1.0 + (updates - 1.0) / inv_gamma, -power);
    const double decay = grown > min_decay ? grown : min_decay;
    return 1.0 - (decay < max_decay ? decay : max_decay);
  }
};

}  // namespace dpa::math
