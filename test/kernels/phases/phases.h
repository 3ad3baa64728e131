// The general engine's arguments: one loop of the network by one persistent kernel.
#pragma once
#include <cstdint>

#include "test/kernels/phases/plan.h"

namespace dpa::kernels::unet1d {

struct PhaseLoop {
  const uint8_t* weights;  // tiles in the order of make_phases
  const float* floats;     // Plan's floats
  const Phase* phases;     // on the device
  const PhaseRun* runs;    // of phase_runs, on the device
  int num_phases;
  PhaseShared shared;
  uint32_t* workspace;
  const float *film_step, *film_cond;  // (steps, film_rows); (batch, film_rows) or null
  int film_rows, film_scale;
  const float *initial, *table, *noise;  // (batch, horizon, actions); (steps, 6); (steps, batch, horizon, actions)
  float clip;
  float* output;
  int batch, horizon, actions, taps, channels, steps;
  int sample_words, output_words, output_slices;
  Head head;
  Tail tail;
  long long* marks;  // clocks of the last step, (block, phase, kPhaseMarks), or null
};

/// What a block has just done: begun, set up, received, normalised (statistics), applied, applied again (for the
/// comparison with warm instructions; only where marks are wanted), multiplied, stored;
/// last: received again, parameters stored.
constexpr int kPhaseMarks = 9;

/// Words at the start of the workspace.
enum PhaseWord { kEpoch = 0, kDone = 1, kStuck = 2 };

#ifdef __CUDACC__
/// A cooperative launch of `blocks` blocks.
cudaError_t launch_phases(DType dtype, const PhasePlan& plan, const PhaseLoop& loop, int blocks, cudaStream_t stream);
#endif

}  // namespace dpa::kernels::unet1d
