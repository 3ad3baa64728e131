// The arguments of the kernel that runs the loop in phases.
#pragma once
#include <cstdint>

#include "kernels/plans/unet1d/loop.h"
#include "kernels/plans/unet1d/phases.h"

namespace dpa::kernels::unet1d {

struct PhaseLoop : LoopArguments {
  Phase phases[kMaxPhases];
  int num_phases, slots, warp_runs, channels;
  int sample_words, output_words, output_slices;
  PhaseShared shared;
  uint32_t* workspace;   // words of the messages, zeros before a launch
  PhaseRun* runs;        // behind them: warp_runs a warp; then num_phases entries of the table a block
  int64_t noise_stride;  // from step to step
  long long* marks;      // clocks of the last step, (block, phase, kPhaseMarks), or null
};
static_assert(sizeof(PhaseLoop) < 32764, "a kernel's parameters hold no more");

/// What a block has just done: begun, set up, received, normalised (statistics), applied, applied again (for the
/// comparison with warm instructions; only where marks are wanted), multiplied, stored;
/// last: received again, parameters stored.
constexpr int kPhaseMarks = 9;

/// The word at the start of the workspace: set where a test's build has stopped to wait.
enum PhaseWord { kStuck = 0 };

/// The arguments but for what LoopArguments holds. `workspace`: phase_workspace_bytes.
inline void set_phases(PhaseLoop& loop, const Plan& plan, const PhasePlan& phases, void* workspace) {
  for (size_t i = 0; i < phases.phases.size(); i++) loop.phases[i] = phases.phases[i];
  loop.num_phases = static_cast<int>(phases.phases.size()), loop.slots = phases.ring_slots;
  loop.warp_runs = phases.warp_runs, loop.channels = plan.config.down_dims[0];
  loop.sample_words = phases.sample_words, loop.output_words = phases.output_words;
  loop.output_slices = phases.output_slices, loop.shared = phases.shared;
  loop.workspace = static_cast<uint32_t*>(workspace);
  loop.runs = reinterpret_cast<PhaseRun*>(loop.workspace + phases.workspace_words);
}

}  // namespace dpa::kernels::unet1d
