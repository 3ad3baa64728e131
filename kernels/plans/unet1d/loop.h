// The arguments that every kernel of a whole loop takes.
#pragma once
#include <cstdint>

#include "kernels/plans/unet1d/plan.h"

namespace dpa::kernels::unet1d {

struct LoopArguments {
  int batch, horizon, steps, actions, taps, film_scale;
  const uint8_t* weights;
  const float* floats;
  const float *film_step, *film_cond;            // film_cond: null for one sample, where it is in film_step already
  int64_t film_step_stride, film_sample_stride;  // of film_step: from step to step, from sample to sample
  int film_rows;
  Head head;
  Tail tail;
  const float *initial, *table, *noise, *condition_data;
  const uint8_t* condition_mask;
  float* output;
  float clip;
};

}  // namespace dpa::kernels::unet1d
