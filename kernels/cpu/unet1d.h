// The conditional 1-D U-Net on packed weights, on the CPU: one forward pass, or the whole denoising loop. The same plan
// as on the GPU (kernels/plans/unet1d/plan.h), a layout of its own for the weights.
//
//   pack      the original tensors, rearranged once: panels of 16 output channels in the order of use
//   Program   what a call computes, as data: a GEMM or two a layer, and what becomes of their output
//   run       executes it; every thread of a team calls it at once, and two barriers a layer keep them together
//
// A GEMM is owned by the thread that owns its output channels, over the whole depth: results do not depend on the
// number of threads.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/team.h"
#include "kernels/plans/unet1d/plan.h"

namespace dpa::kernels::cpu {

using unet1d::Plan;

/// Whether weights of such a type can be packed here.
inline bool packs(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

/// Why a plan cannot run on the CPU (empty when it can).
std::string reject(const Plan& plan, int64_t batch, int64_t horizon);

/// The tensors that `pack` reads, each contiguous: plan.weights[i] in float32 where floats[i], and in the plan's type
/// where typed[i].
struct Sources {
  std::vector<bool> needs_float, needs_typed;  // what is read at all
  std::vector<const float*> floats;
  std::vector<const void*> typed;
};
Sources pack_sources(const Plan& plan);

/// Packing in independent tasks, in any order: all of 0 .. pack_tasks - 1 fill `packed` (plan.packed_bytes).
int64_t pack_tasks(const Plan& plan);
void pack(const Plan& plan, const Sources& sources, void* packed, int64_t begin, int64_t end);

/// Whether `pack` made these bytes, for this plan.
bool packed_here(const Plan& plan, const void* packed);

/// One call; B = batch, T = horizon, A = action_dim, S = steps, as in kernels/cuda/unet1d/unet1d.h.
struct Call {
  int batch, horizon, steps;
  const void* packed;
  const float* timesteps;     // (S), or (B) where per_sample_timesteps
  bool per_sample_timesteps;  // S is 1 and every sample has a timestep of its own
  const float* global_cond;   // (B, cond_dim), null where cond_dim is 0
  const float* initial;       // (B, T, A)
  const float* table;         // (S, 6), or null: the output is the network's, and S is 1
  float clip;
  const float* noise;             // (S, B, T, A), or null
  const float* condition_data;    // (B, T, A), or null
  const uint8_t* condition_mask;  // (B, T, A)
  const float* local;             // (S, B, T, first width), added to the first block's output, or null
  float* output;                  // (B, T, A)
  // Set where a value was too large for float16, and the output is wrong; null: bfloat16 weights are not multiplied in
  // float16.
  std::atomic<bool>* overflow;
};

struct Layer {
  Gemm gemms[2];
  Tasks tasks[2];
  int num_gemms;
  Epilogue epilogue;
  int64_t film;  // offset of the layer's scale and shift in a row of FiLM, or -1
};

/// Everything that a call's threads share. Pointers point into the call's tensors and its workspace.
struct Program {
  const Plan* plan;
  const Kernels* kernels;
  Call call;
  const float* floats;  // of the packed weights
  // FiLM: (N, D), (N, 4 D), (N, D), (N, R), (B, cond_dim), (B, R) for N timesteps.
  float *sinusoid, *hidden, *embedding, *film_step, *mish_cond, *film_cond;
  int film_rows;
  float* sample;  // (B, T + 2 halo, A), zeros around each sample
  int64_t sample_stride;
  int halo;
  char* zeroed;  // the GEMMs' inputs: zeros where nothing is written
  size_t zeroed_bytes;
  float *raw, *residual, *value;
  Epilogue head;
  std::vector<Layer> layers;
};

/// How many threads a pass can use: one for every 8 million multiply-adds, which take it 0.15 ms, or for every 4 MB of
/// the convolutions' weights, which few samples wait for. With less each, threads lose more at their barriers, two a
/// layer, than they win; and far more where another program has one's core.
int64_t useful_threads(const Plan& plan, int batch, int horizon);

/// Fills `program` for a team of this size, with its buffers at `workspace` (aligned to 64); returns their bytes. With
/// a null workspace it counts only.
size_t make_program(const Plan& plan, const Kernels& kernels, const Call& call, int team, void* workspace,
                    Program& program);

/// One thread's part.
void run(const Program& program, Team& team, int thread);

}  // namespace dpa::kernels::cpu
