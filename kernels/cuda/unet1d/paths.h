// The paths of a call, and what the host gives each of them.
#pragma once
#include "kernels/cuda/unet1d/film.h"
#include "kernels/cuda/unet1d/unet1d.h"
#include "kernels/plans/unet1d/loop.h"

namespace dpa::kernels::unet1d {

LoopArguments loop_arguments(const Plan& plan, const Call& call, const Workspace& at);

/// FiLM's parameters as the kernels read them: step + cond, or step alone.
struct FilmView {
  const float *step, *cond;
  int64_t step_stride, sample_stride;  // of step; cond has a row a sample
};
FilmView film_view(const Plan& plan, const Call& call, const Workspace& at);

cudaError_t run_layered(const Plan& plan, const Call& call, const Workspace& at, cudaStream_t stream);
cudaError_t run_phases(const Plan& plan, const Call& call, const Workspace& at, const Device& device,
                       cudaStream_t stream);
cudaError_t run_teams(const Plan& plan, const Call& call, const Workspace& at, const Device& device,
                      cudaStream_t stream);
cudaError_t run_clustered(const Plan& plan, const Call& call, const Workspace& at, cudaStream_t stream);
cudaError_t run_resident(const Plan& plan, const Call& call, const Workspace& at, const Device& device,
                         cudaStream_t stream);

}  // namespace dpa::kernels::unet1d
