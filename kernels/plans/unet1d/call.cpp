#include "kernels/plans/unet1d/call.h"

#include <algorithm>

#include "kernels/plans/unet1d/cluster_batch_layout.h"
#include "kernels/plans/unet1d/phases.h"
#include "kernels/plans/unet1d/resident_layout.h"
#include "kernels/plans/unet1d/teams.h"

namespace dpa::kernels::unet1d {

static PhaseDevice phase_device(const Device& device) { return {device.multiprocessors, device.shared_bytes}; }
static size_t phase_bytes(const Plan& plan, int samples, int horizon, const PhaseDevice& device) {
  return phase_workspace_bytes(*phases_of(plan, samples, horizon, device), device);
}

int teams_of(const Device& device) {
  return device.team_clusters > 0 ? device.team_clusters : device.multiprocessors / kTeamBlocks;
}
int team_samples(const Plan& plan, int batch, int horizon, const Device& device) {
  return team_samples(plan, batch, horizon, teams_of(device), device.shared_bytes);
}

Workspace workspace(const Plan& plan, int batch, int horizon, int steps, Path path, const Device& device) {
  Workspace w = {};
  auto take = [&](size_t bytes) {
    const size_t begin = w.bytes;
    w.bytes += (bytes + 255) / 256 * 256;
    return begin;
  };
  auto floats = [&](size_t n) { return take(n * sizeof(float)); };
  const size_t rows = std::max(steps, batch), dim = plan.config.step_dim,
               columns = static_cast<size_t>(batch) * horizon;
  w.hidden = floats(rows * dim * 4);
  w.embedding = floats(rows * dim);
  w.step = floats(rows * plan.film_rows);
  w.cond = floats(static_cast<size_t>(batch) * plan.film_rows);
  if (path == Path::kLayered) {
    w.sample = floats(columns * plan.config.action_dim);
    size_t widest = columns * plan.config.down_dims[0];
    for (const Conv& conv : plan.convs)
      widest = std::max(widest, static_cast<size_t>(batch) * (horizon >> conv.level_out) * conv.channels_out);
    w.value = floats(widest);
    w.raw = floats(widest);
    w.residual = floats(widest);
    for (int i = 1; i < plan.config.levels; i++)
      w.skips[i] = floats(static_cast<size_t>(batch) * (horizon >> i) * plan.config.down_dims[i]);
  }
  if (path == Path::kResident)
    w.message_bytes = resident_layout(plan, batch, horizon, device).message_words * sizeof(uint32_t);
  if (path == Path::kClustered) w.message_bytes = 2 * cluster_layout(plan, batch, horizon).message_bytes;
  if (path == Path::kClusterBatch) w.message_bytes = 2 * cluster_batch::layout(plan, batch, horizon).message_bytes;
  if (path == Path::kPhases) {
    const int samples = std::max(1, phase_samples(plan, batch, horizon, device));
    for (const int n : {samples, batch % samples})
      if (n > 0) w.message_bytes = std::max(w.message_bytes, phase_bytes(plan, n, horizon, phase_device(device)));
  }
  if (path == Path::kTeams) {
    const int samples = std::max(1, team_samples(plan, batch, horizon, device));
    for (const int n : {samples, batch % samples})
      if (n > 0)
        w.message_bytes = std::max(
            w.message_bytes, team_workspace_bytes(make_teams(plan, n, horizon, teams_of(device), device.shared_bytes)));
  }
  w.messages = take(w.message_bytes);
  return w;
}

size_t film_workspace_bytes(const Plan& plan, int steps) {
  return (static_cast<size_t>(steps) * plan.config.step_dim * 5 + plan.film_rows) * sizeof(float);
}

size_t workspace_bytes(const Plan& plan, int batch, int horizon, int steps, Path path, const Device& device) {
  return workspace(plan, batch, horizon, steps, path, device).bytes;
}

std::string reject(const Plan& plan, int batch, int horizon, int steps) {
  if (!plan.error.empty()) return plan.error;
  if (batch < 0) return "batch must not be negative, got " + std::to_string(batch);
  if (steps < 0) return "steps must not be negative, got " + std::to_string(steps);
  const int multiple = 1 << (plan.config.levels - 1);
  if (horizon < 1 || horizon % multiple) {
    return "horizon must be a positive multiple of 2^(levels - 1) = " + std::to_string(multiple) + ", got " +
           std::to_string(horizon);
  }
  const int64_t columns = static_cast<int64_t>(batch) * horizon;
  if (columns > kMaxColumns)
    return "batch * horizon must be at most " + std::to_string(kMaxColumns) + ", got " + std::to_string(columns);
  int64_t widest = 0;
  for (const Conv& conv : plan.convs) widest = std::max(widest, columns * conv.channels_out);
  if (widest >= int64_t{1} << 31) return "batch * horizon * channels must be below 2^31, got " + std::to_string(widest);
  return "";
}

int phase_samples(const Plan& plan, int batch, int horizon, const Device& device) {
  constexpr int kColumns = 1024;  // of a launch: a larger one would only need more memory
  if (batch < 1 || horizon < 1) return 0;
  const int launches = ceil_div(batch, std::max(1, kColumns / horizon)), samples = ceil_div(batch, launches);
  return phases_of(plan, samples, horizon, phase_device(device))->error.empty() ? samples : 0;
}

// Whether a team is faster than all multiprocessors together: it streams all weights, but hands over sooner. A batch in
// parts takes the time of every part.
static bool teams_pay(const Plan& plan, int batch, int horizon, const Device& device) {
  constexpr int64_t kMost = 14 << 20, kMostFloat32 = 5 << 20;  // weights; of float32 where a team has several samples
  const int64_t weights = plan.tile_bytes / element_bytes(plan.dtype);
  if (weights > kMost) return false;
  if (plan.dtype == DType::kFloat32 && weights > kMostFloat32 && batch > teams_of(device)) return false;
  return team_samples(plan, batch, horizon, device) >= batch;
}

Path choose_path(const Plan& plan, int batch, int horizon, const Device& device) {
  // Beyond these sizes the loop in phases is faster, measured on an H200.
  constexpr int kClusteredBatch = 32, kResidentHorizon = 48;
  if (device.hopper && device.clusters && batch <= kClusteredBatch && cluster_serves(plan, batch, horizon))
    return Path::kClustered;
  if (device.hopper && device.clusters && cluster_batch::serves(plan, batch, horizon)) return Path::kClusterBatch;
  if (batch == 1 && solo_fits(plan, horizon, device)) return Path::kResident;
  if (teams_pay(plan, batch, horizon, device)) return Path::kTeams;
  if (device.hopper && batch == 1 && horizon <= kResidentHorizon && resident_fits(plan, batch, horizon, device))
    return Path::kResident;
  return phase_samples(plan, batch, horizon, device) > 0 ? Path::kPhases : Path::kLayered;
}

}  // namespace dpa::kernels::unet1d
