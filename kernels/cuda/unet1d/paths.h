// The paths of a call, and what the host gives each of them.
#pragma once
#include "kernels/cuda/unet1d/film.h"
#include "kernels/cuda/unet1d/unet1d.h"

namespace dpa::kernels::unet1d {

/// The arguments of the kernels that run a whole loop.
struct LoopArguments {
  int batch, horizon, steps, actions, taps, film_scale;
  const uint8_t* weights;
  const float* floats;
  const float *film_step, *film_cond;            // film_cond: null for one sample, where it is in film_step already
  int64_t film_step_stride, film_sample_stride;  // rows of film_step: from step to step, from sample to sample
  int film_rows;
  Head head;
  Tail tail;
  const float *initial, *table, *noise, *condition_data;
  const uint8_t* condition_mask;
  float* output;
  float clip;
};
LoopArguments loop_arguments(const Plan& plan, const Call& call, const Workspace& at);

/// FiLM's parameters as the kernels read them: step + cond, or step alone.
struct FilmView {
  const float *step, *cond;
  int64_t step_stride, sample_stride;  // of step; cond has a row a sample
};
FilmView film_view(const Plan& plan, const Call& call, const Workspace& at);

cudaError_t run_layered(const Plan& plan, const Call& call, const Workspace& at, cudaStream_t stream);
cudaError_t run_clustered(const Plan& plan, const Call& call, const Workspace& at, cudaStream_t stream);
cudaError_t run_resident(const Plan& plan, const Call& call, const Workspace& at, cudaStream_t stream);

}  // namespace dpa::kernels::unet1d
