// FiLM's parameters before the loop: film_step (rows of timesteps, film_rows), film_cond (B, film_rows).
#pragma once
#include "kernels/cuda/unet1d/unet1d.h"

namespace dpa::kernels::unet1d {

/// Scratch and results, all floats on the device. R = film_rows, D = step_dim, N = S timesteps or B.
struct FilmBuffers {
  float* hidden;     // (N, 4 D)
  float* embedding;  // (N, D)
  float* step;       // (N, R): W_t Mish(t), plus `cond` where there is one sample
  float* cond;       // (B, R): W_g Mish(g) + b, or null where the timesteps' part alone is wanted
};

cudaError_t film(const Plan& plan, const Call& call, const FilmBuffers& buffers, cudaStream_t stream);

}  // namespace dpa::kernels::unet1d
