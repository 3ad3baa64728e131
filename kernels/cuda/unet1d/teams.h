// The arguments of the kernel that runs the loop in teams.
#pragma once
#include "kernels/plans/unet1d/loop.h"
#include "kernels/plans/unet1d/teams.h"

namespace dpa::kernels::unet1d {

struct TeamArguments : LoopArguments {
  TeamPhase phases[kMaxTeamPhases];
  int num_phases, slots, warp_loads, channels;
  int team_samples, halo, team_words, tail_words, sum_segment, slab_bytes;
  TeamShared shared;
  uint32_t* workspace;  // its first word: stuck, in a test's build; then the words of every team, zeros before a launch
  int64_t noise_stride;  // from step to step
  long long* marks;      // of a build with DPA_TEST_MARKS: clocks of the last step, (block, phase, kTeamMarks), or null
};
static_assert(sizeof(TeamArguments) < 32764, "a kernel's parameters hold no more");

/// What a block has just done: begun, fetched its parameters, received, multiplied, met, summed, normalised, sent.
constexpr int kTeamMarks = 8;
constexpr int kTeamFirstWord = 32;  // of the words of the first team

inline void set_teams(TeamArguments& a, const Plan& plan, const TeamPlan& teams, void* workspace) {
  for (size_t i = 0; i < teams.phases.size(); i++) a.phases[i] = teams.phases[i];
  a.num_phases = static_cast<int>(teams.phases.size()), a.slots = teams.buffer_slots, a.warp_loads = teams.warp_loads;
  a.channels = plan.config.down_dims[0], a.team_samples = teams.samples, a.halo = teams.halo;
  a.team_words = teams.words, a.tail_words = teams.phases.back().words, a.sum_segment = teams.sum_segment;
  a.slab_bytes = teams.slab_bytes, a.shared = teams.shared;
  a.workspace = static_cast<uint32_t*>(workspace);
}

}  // namespace dpa::kernels::unet1d
