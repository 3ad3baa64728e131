// Where a call's intermediate values lie in its workspace. Both paths share the buffer: it is as large as the larger of
// them needs.
#pragma once
#include "kernels/unet1d/film.h"
#include "kernels/unet1d/unet1d.h"

namespace dpa::kernels::unet1d {

/// Byte offsets.
struct Workspace {
  size_t hidden, embedding, step, cond;            // FilmBuffers
  size_t sample;                                   // (B, T, A)
  size_t value, raw, residual, skips[kMaxLevels];  // layered: activations (B, time, C)
  size_t messages, message_bytes;                  // resident: partial sums
  size_t bytes;
};
Workspace workspace(const Plan& plan, int batch, int horizon, int steps);

/// What the kernels that stay for a whole loop are told, whichever they are.
struct LoopArguments {
  int batch, horizon, steps, actions, taps, film_scale;
  const uint8_t* weights;
  const float* floats;
  const float *film_step, *film_cond;            // film_cond: null for one sample, where it is in film_step already
  int64_t film_step_stride, film_sample_stride;  // rows of film_step: from step to step, from sample to sample
  int film_rows;
  Head head;
  Tail tail;
  const float *initial, *table, *noise, *known;
  const uint8_t* mask;
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

/// Words of the resident path's messages: every product's partial sums, and the tail's.
size_t message_words(const Plan& plan, int batch, int horizon);

cudaError_t run_layered(const Plan& plan, const Call& call, const Workspace& at, cudaStream_t stream);
cudaError_t run_clustered(const Plan& plan, const Call& call, const Workspace& at, cudaStream_t stream);
cudaError_t run_resident(const Plan& plan, const Call& call, const Workspace& at, cudaStream_t stream);

/// Whether the resident kernel can run a call of these sizes on such a device.
bool resident_fits(const Plan& plan, int batch, int horizon, int multiprocessors, int shared_bytes);
/// Whether it would be the one-sample kernel, which keeps records.
bool records(const Plan& plan, int batch, int horizon, int shared_bytes);

}  // namespace dpa::kernels::unet1d
