#include "kernels/plans/unet1d/call.h"

#include <algorithm>

#include "kernels/plans/unet1d/cluster_layout.h"
#include "kernels/plans/unet1d/phases.h"
#include "kernels/plans/unet1d/resident_layout.h"
#include "kernels/plans/unet1d/teams.h"

namespace dpa::kernels::unet1d {

const char* name_of(Path path) {
  constexpr const char* kNames[] = {"automatic", "resident", "clusters", "teams", "phases", "layered"};
  return kNames[static_cast<int>(path)];
}

Workspace workspace(const Plan& plan, int batch, int horizon, int steps, Path path, const Device& device) {
  Workspace w = {};
  Places<size_t> take = {256};
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
    w.message_bytes = resident_layout(plan, horizon, device).message_words * sizeof(uint32_t);
  if (path == Path::kClustered) w.message_bytes = 2 * cluster_layout(plan, batch, horizon).message_bytes;
  if (path == Path::kPhases) {
    const int samples = std::max(1, phase_samples(plan, batch, horizon, device));
    for (const int n : {samples, batch % samples})
      if (n > 0)
        w.message_bytes =
            std::max(w.message_bytes, phase_workspace_bytes(*phases_of(plan, n, horizon, device), device));
  }
  if (path == Path::kTeams) {
    const TeamCall call = team_call(plan, batch, horizon, device);
    const int samples = std::max(1, call.samples);
    for (const int n : {samples, batch % samples})
      if (n > 0)
        w.message_bytes = std::max(w.message_bytes,
                                   team_workspace_bytes(make_teams(plan, n, horizon, call.teams, device.shared_bytes)));
  }
  w.messages = take(w.message_bytes);
  w.bytes = take.at;
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

static double weights_of(const Plan& plan) {
  return static_cast<double>(plan.tile_bytes) / element_bytes(plan.dtype) * 1e-6;
}

int phase_samples(const Plan& plan, int batch, int horizon, const Device& device) {
  // Columns of a launch: a narrow network's step is mostly hand-overs, whatever their size; behind a wide one's, larger
  // launches gain nothing, and only need more memory.
  constexpr int kLeast = 1024, kMost = 16384;
  constexpr double kWeightColumns = 256 * 1024;  // millions of weights times columns
  if (batch < 1 || horizon < 1) return 0;
  const int columns = static_cast<int>(std::clamp<double>(kWeightColumns / weights_of(plan), kLeast, kMost));
  for (int launches = ceil_div(batch, std::max(1, columns / horizon));; launches *= 2) {
    const int samples = ceil_div(batch, launches);
    if (phases_of(plan, samples, horizon, device)->error.empty()) return samples;
    if (samples == 1) return 0;
  }
}

// Microseconds of a step in phases on an H200, within a tenth up to 1024 columns: of a phase, whatever its size; of a
// million weights times 1024 columns.
static double phase_time(const Plan& plan, int batch, int horizon, int samples) {
  constexpr double kPhase = 5.2, kColumns = 10, kColumnsFloat32 = 15;
  return ceil_div(batch, samples) * kPhase * static_cast<double>(plan.convs.size() + 1) +
         batch * horizon / 1024.0 * weights_of(plan) * (plan.dtype == DType::kFloat32 ? kColumnsFloat32 : kColumns);
}

// Whether teams are faster than all multiprocessors together: each streams all weights, but hands over sooner.
static bool teams_pay(const Plan& plan, int batch, int horizon, const TeamCall& teams, const Device& device) {
  const int samples = phase_samples(plan, batch, horizon, device);
  return teams.samples > 0 && (samples == 0 || teams.time < phase_time(plan, batch, horizon, samples));
}
// Whether they are faster than clusters for several samples, of which no layer takes less than that.
static bool teams_beat_clusters(const Plan& plan, const TeamCall& teams) {
  constexpr double kLayer = 2.9;  // us on an H200
  return teams.samples > 0 && teams.time < kLayer * static_cast<double>(plan.convs.size() + 1);
}
// The kernel for wide networks that serves a call, or kAutomatic where none does.
static Path wide_path(const Plan& plan, int batch, int horizon, const Device& device) {
  if (plan.config.relu) return Path::kAutomatic;
  if (device.hopper && device.clusters && cluster_serves(plan, batch, horizon)) return Path::kClustered;
  return batch == 1 && resident_fits(plan, horizon, device) ? Path::kResident : Path::kAutomatic;
}

Path choose_path(const Plan& plan, int batch, int horizon, const Device& device) {
  const Path wide = wide_path(plan, batch, horizon, device);
  if (wide != Path::kAutomatic && batch == 1) return wide;  // teams take long to plan
  const TeamCall teams = team_call(plan, batch, horizon, device);
  if (wide != Path::kAutomatic) return teams_beat_clusters(plan, teams) ? Path::kTeams : wide;
  if (teams_pay(plan, batch, horizon, teams, device)) return Path::kTeams;
  return phase_samples(plan, batch, horizon, device) > 0 ? Path::kPhases : Path::kLayered;
}

bool layers_pay(const Plan& plan, int batch, int horizon, const Device& device) {
  const Config& c = plan.config;
  if (c.relu) return false;
  int narrowest = c.width(0).own;
  bool odd = false;  // groups: the layers of a block then run one by one, and pack their weights in each step
  for (int i = 0; i < c.levels; i++) {
    const int width = c.width(i).own;
    if (width % 8) return false;  // the GEMMs of layers do not serve
    odd = odd || width / c.num_groups % 2;
    narrowest = std::min(narrowest, width);
  }
  const Path path = choose_path(plan, batch, horizon, device);
  const bool twice = path == Path::kClustered && batch > kChunkSamples;  // in two launches
  if (!device.hopper || path == Path::kResident || (path == Path::kClustered && !twice)) return false;
  if (odd && path != Path::kLayered) return false;
  // Layers take almost the time of one sample for many. A layer has hand-overs twice as long as a phase, but GEMMs that
  // take no longer for more columns. Where they begin was measured on an H100. Without Hopper's instructions they take
  // twice a phase's time at 512 columns.
  const double columns = static_cast<double>(batch) * horizon;
  if (narrowest < 256 || c.kernel_size > 5) {
    // Below 64 channels half of a tile is empty. Where tiles of rows are full, norms take least.
    const bool full = power_of_two(narrowest) && power_of_two(horizon);
    const double ahead = narrowest < 64 ? 0.6 : c.kernel_size > 5 ? 0.4 : full ? 0.25 : 0.3;
    return weights_of(plan) * columns > ahead * 1074 * static_cast<double>(plan.convs.size() + 1);
  }
  // 320/480/960 and such, whose channels have few powers of two: phases took 1.2 to 2 times as long.
  if (c.num_groups == 8 && plan.slices_out <= 2) return columns >= 64;
  if (narrowest >= 512) return columns >= 192 || batch >= 16;
  return columns >= 320;
}

}  // namespace dpa::kernels::unet1d
