// One step of a diffusion sampler, as a function of scalars: the value and the derivatives of `denoise` and
// `scheduler_step`. `A` is the type of the arithmetic, float or double.
#pragma once
#include <cstdint>

#include "kernels/math/host_device.h"

namespace dpa::math {

/// `x` limited to [-limit, limit]; NaN stays NaN.
template <class A>
DPA_HOST_DEVICE A clamp(A x, A limit) {
  return x < -limit ? -limit : (x > limit ? limit : x);
}

/// Derivatives of one element's step. `row` has a column for each coefficient.
template <class A, int Columns>
struct StepGradient {
  A model_output, sample, noise, row[Columns];
};

/// x0 = clamp((sample - c0 * output) / c1, -1, 1);  out = c3 * x0 + c2 * sample + (timestep != 0 ? c4 * noise : 0)
template <class A>
struct DenoiseStep {
  static constexpr int kColumns = 5;
  A c0, c1, c2, c3, c4;
  bool noisy;

  DPA_HOST_DEVICE DenoiseStep(const A* table, int64_t row, A /*clip*/, bool has_noise) {
    const A* c = table + row * kColumns;
    c0 = c[0], c1 = c[1], c2 = c[2], c3 = c[3], c4 = c[4];
    noisy = has_noise && row != 0;
  }
  DPA_HOST_DEVICE A step(A output, A sample, A noise) const {
    const A x0 = clamp((sample - c0 * output) / c1, A(1));
    const A mean = c3 * x0 + c2 * sample;
    return noisy ? mean + c4 * noise : mean;
  }
  DPA_HOST_DEVICE StepGradient<A, kColumns> gradient(A grad, A output, A sample, A noise) const {
    const A raw = (sample - c0 * output) / c1;
    const bool inside = raw >= A(-1) && raw <= A(1);
    const A grad_raw = inside ? grad * c3 : A(0);
    return {-grad_raw * c0 / c1,
            grad_raw / c1 + grad * c2,
            noisy ? grad * c4 : A(0),
            {-grad_raw * output / c1, -grad_raw * raw / c1, grad * sample, grad * clamp(raw, A(1)),
             noisy ? grad * noise : A(0)}};
  }
};

/// x0 = clamp(r0 * sample + r1 * output, -clip, clip);  out = r2 * x0 + r3 * sample + r4 * output + r5 * noise
template <class A>
struct SchedulerStep {
  static constexpr int kColumns = 6;
  A r0, r1, r2, r3, r4, r5, clip;
  bool noisy;

  DPA_HOST_DEVICE SchedulerStep(const A* table, int64_t row, A clip, bool has_noise) : clip(clip), noisy(has_noise) {
    const A* r = table + row * kColumns;
    r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3], r4 = r[4], r5 = r[5];
  }
  DPA_HOST_DEVICE A step(A output, A sample, A noise) const {
    const A x0 = clamp(r0 * sample + r1 * output, clip);
    const A mean = r2 * x0 + r3 * sample + r4 * output;
    return noisy ? mean + r5 * noise : mean;
  }
  DPA_HOST_DEVICE StepGradient<A, kColumns> gradient(A grad, A output, A sample, A noise) const {
    const A raw = r0 * sample + r1 * output;
    const bool inside = raw >= -clip && raw <= clip;
    const A grad_raw = inside ? grad * r2 : A(0);
    return {grad_raw * r1 + grad * r4,
            grad_raw * r0 + grad * r3,
            noisy ? grad * r5 : A(0),
            {grad_raw * sample, grad_raw * output, grad * clamp(raw, clip), grad * sample, grad * output,
             noisy ? grad * noise : A(0)}};
  }
};

}  // namespace dpa::math
