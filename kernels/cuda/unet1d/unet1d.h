// The conditional 1-D U-Net of Diffusion Policy on packed weights: one forward pass, or the whole denoising loop.
//
//   plan     what to compute, as data: make_plan is a pure host function of the architecture and the weights' type
//   pack     the original tensors, rearranged once into one buffer in the order of use
//   film     scale and shift of every residual block, taken out of the loop:
//            W Mish(cat(t, g)) + b = W_t Mish(t) + (W_g Mish(g) + b), a table over the timesteps and a row a sample
//   sample   the loop on one stream: x0 = clamp(r0 x + r1 eps, -clip, clip); x = r2 x0 + r3 x + r4 eps + r5 noise
//
// Nothing here allocates, synchronises or reads device memory from the host: every call can be captured into a graph.
// None of it is differentiable.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/common/dtype.h"
#include "kernels/plans/unet1d/call.h"

namespace dpa::kernels::unet1d {

/// Packs the tensors `weights[i]` (device pointers, contiguous, of type `source`, in the order of plan.weights) into
/// `packed` (plan.packed_bytes, aligned to 128).
cudaError_t pack(const Plan& plan, const void* const* weights, DType source, void* packed, cudaStream_t stream);

/// One call. Every pointer is on the device; B = batch, T = horizon, A = action_dim, S = steps.
struct Call {
  int batch, horizon, steps;
  const void* packed;
  void* workspace;            // workspace_bytes, aligned to 256; holds nothing between calls
  const float* timesteps;     // (S), or (B) where per_sample_timesteps
  bool per_sample_timesteps;  // S is 1 and every sample has a timestep of its own
  const float* global_cond;   // (B, cond_dim), null where cond_dim is 0
  const float* initial;       // (B, T, A): the noise the loop begins with, or the input of one forward pass
  const float* table;         // (S, 6): r0 ... r5 of each step; null: the output is the network's, and S is 1
  float clip;
  const float* noise;             // (S, B, T, A), or null
  const float* condition_data;    // (B, T, A): inpainted values, or null
  const uint8_t* condition_mask;  // (B, T, A): 1 where `condition_data` holds; before every step and after the last one
  float* output;                  // (B, T, A)
  Path path = Path::kAutomatic;
  uint32_t* record = nullptr;   // zeroed; where the one-sample kernel notes its clocks in the last step, or null
  const float* film = nullptr;  // of one forward pass: rows of film_table, (B, film_rows), instead of timesteps and
                                // global_cond
  const float* step_film = nullptr;  // of a loop: step_film_table's, (S, film_rows), instead of timesteps
  const float* local = nullptr;      // (S, B, T, first width), added to the first block's output: local conditions,
                                     // encoded
};

/// The shape of a record: blocks, layers (the first convolution, then every GEMM), kMarks. No blocks where the
/// current device would not run the one-sample kernel.
struct RecordShape {
  int blocks = 0, layers = 0;
};
RecordShape record_shape(const Plan& plan, int batch, int horizon);

/// Whether the clusters of the kernel for several samples fit a Hopper device; asked once a device.
bool clusters_fit(int device);
/// Clusters of a team's blocks that fit the current device, a Hopper one, at once; asked once a device.
int team_clusters(int device);

/// FiLM's parameters at every step, with the observation's part: (S, plan.film_rows), for one sample. `workspace`: of
/// film_workspace_bytes.
cudaError_t film_table(const Plan& plan, const void* packed, const float* timesteps, int steps,
                       const float* global_cond, void* workspace, float* table, cudaStream_t stream);

/// The part of FiLM's parameters that the timesteps alone decide: (S, plan.film_rows). `workspace` as above.
cudaError_t step_film_table(const Plan& plan, const void* packed, const float* timesteps, int steps, void* workspace,
                            float* table, cudaStream_t stream);

/// What the current device is.
cudaError_t current_device(Device& device);

/// Runs a call on `stream`.
cudaError_t sample(const Plan& plan, const Call& call, const Device& device, cudaStream_t stream);

}  // namespace dpa::kernels::unet1d
