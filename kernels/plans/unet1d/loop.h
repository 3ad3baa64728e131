// The arguments that every kernel of a whole loop takes.
#pragma once
#include <cstdint>

#include "kernels/plans/unet1d/plan.h"

namespace dpa::kernels::unet1d {

struct LoopArguments {
  int batch, horizon, steps, actions, taps, film_scale;
  float steepness = 1.0f;  // what follows norms is x tanh(softplus(steepness x)): Mish with 1, with a huge one ReLU
  const uint8_t* weights;
  const float* floats;
  const float *film_step, *film_cond;            // film_cond: null for one sample, where it is in film_step already
  int64_t film_step_stride, film_sample_stride;  // of film_step: from step to step, from sample to sample
  int film_rows;
  Head head;
  Tail tail;
  const float* local;                // what the first block's output is added to at each step, or null
  int64_t local_step, local_sample;  // elements from step to step, from sample to sample
  const float *initial, *table, *noise, *condition_data;
  const uint8_t* condition_mask;
  float* output;
  float clip;
};

/// The arguments of `count` samples of those, from `first` on. The noise's stride from step to step stays the whole
/// batch's.
inline LoopArguments loop_part(LoopArguments all, int first, int count) {
  const int64_t values = static_cast<int64_t>(all.horizon) * all.actions;
  const auto skip = [&](auto*& p, int64_t n) { p = p ? p + first * n : p; };
  skip(all.initial, values), skip(all.noise, values), skip(all.condition_data, values);
  skip(all.condition_mask, values), skip(all.output, values), skip(all.film_cond, all.film_rows);
  all.film_step += first * all.film_sample_stride;
  if (all.local) all.local += first * all.local_sample;
  all.batch = count;
  return all;
}

}  // namespace dpa::kernels::unet1d
