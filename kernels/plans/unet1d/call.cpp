#include "kernels/plans/unet1d/call.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/plans/conv1d/shape.h"
#include "kernels/plans/group_norm_mish/plan.h"
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

// Microseconds to read all weights from memory.
static double read_time(const Plan& plan) {
  constexpr double kMegabyte = 0.35;
  return static_cast<double>(plan.tile_bytes) * 1e-6 * kMegabyte;
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
    const auto made = phases_of(plan, samples, horizon, device);
    if (made->error.empty() && made->ring_slots == kPhaseLeastSlots && samples > 1) {
      const int fewer = ceil_div(batch, 2 * launches);
      const auto parts = phases_of(plan, fewer, horizon, device);  // with more room for weights
      const double time = ceil_div(batch, samples) * made->clocks, in_parts = ceil_div(batch, fewer) * parts->clocks;
      if (parts->error.empty() && parts->ring_slots > kPhaseLeastSlots && in_parts < time) return fewer;
    }
    if (made->error.empty()) return samples;
    if (samples == 1) return 0;
  }
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
  const Path other = wide != Path::kAutomatic ? wide : Path::kPhases;
  const double time = path_time(plan, batch, horizon, other, device);
  // Each team streams all weights, but hands over sooner.
  if (path_time(plan, batch, horizon, Path::kTeams, device) < time) return Path::kTeams;
  return std::isfinite(time) ? other : Path::kLayered;
}

bool layers_pay(const Plan& plan, int batch, int horizon, const Device& device) {
  const Config& c = plan.config;
  if (c.relu) return false;
  if (plan.dtype == DType::kFloat32 && c.kernel_size > conv1d::kMaxTaps) return false;
  for (int i = 0; i < c.levels; i++)
    if (c.width(i).own % 8) return false;  // the GEMMs of layers do not serve
  const Path path = choose_path(plan, batch, horizon, device);
  if (path == Path::kResident || (path == Path::kClustered && batch == 1)) return false;
  const double time = layers_time(plan, batch, horizon, device);
  // Two launches a layer took longer than layers in 21 of 22 calls measured on 132 multiprocessors.
  if (path == Path::kLayered) return std::isfinite(time);
  return time < path_time(plan, batch, horizon, path, device);
}

double path_time(const Plan& plan, int batch, int horizon, Path path, const Device& device) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const double gemms = static_cast<double>(plan.convs.size()), read = read_time(plan);
  switch (path) {
    case Path::kResident: {
      // The latency of a layer grows with the channel pairs of a thread; most of what is read, is read meanwhile.
      // kOther: code of 8.0, whose weights come from memory. kLeast: of `read`, whose reading is an H100's.
      constexpr double kGemm = 1.16, kPairs = 0.55, kColumnTile = 0.25, kBesides = 0.3, kOther = 1.2, kLeast = 0.8;
      const ResidentLayout r = resident_layout(plan, horizon, device);
      double time = gemms * (kGemm + kPairs * r.pairs) * (device.hopper ? 1 : kOther) + kBesides * read;
      for (int i = 1; i <= r.count && plan.dtype == DType::kFloat32; i++) time += kColumnTile * (r.solo[i].shape & 15);
      return std::max(time, kLeast * read);
    }
    case Path::kClustered: {
      // Of a layer; more where a cluster has two tiles of the first level, or four, which it multiplies by each tap
      // (measured with three and five), and where a slice has several groups; kRead: of `read`. Times are filled up.
      constexpr double kAlone = 4.2, kBesides = 0.4, kGroups = 1.2, kGemm = 2.75, kTwoTiles = 1.1, kFourTiles = 0.93,
                       kRead = 0.84;
      const double groups = plan.config.num_groups > kSlices ? kGroups : 0, alone = (kAlone + groups) * gemms,
                   four = kFourTiles * std::min(plan.config.kernel_size, 5);
      if (batch == 1) return std::max(alone, read) + kBesides * std::min(alone, read);
      const int columns = 1 << (log2_of(std::min(batch, kChunkSamples)) + log2_of(horizon)),
                tiles = plan.config.down_dims[0] / kTileRows * columns / kTileColumns / kClusters;
      const double more = groups + (tiles > 2 ? four : tiles > 1 ? kTwoTiles : 0);
      return ceil_div(batch, kChunkSamples) * (gemms * (kGemm + more) + kRead * read);
    }
    case Path::kTeams: {
      const TeamCall call = team_call(plan, batch, horizon, device);
      return call.samples > 0 ? call.time : kNever;
    }
    case Path::kPhases: {
      // kClocks: of the plan's model in a microsecond; kWideClocks: in float32. Fitted to 76 networks on an H200, of
      // Hopper's code and of that for 8.0. What it misses: one slice; e4m3 that every block widens.
      constexpr double kPhase = 3.8, kClocks = 2030, kWideClocks = 2400, kNoSlices = 1.06, kWidened = 1.1;
      const int samples = phase_samples(plan, batch, horizon, device);
      if (samples == 0) return kNever;
      double time = kPhase * (gemms + 1) + phases_of(plan, samples, horizon, device)->clocks /
                                               (plan.dtype == DType::kFloat32 ? kWideClocks : kClocks);
      if (plan.slices_in == 1) time *= kNoSlices;
      if (plan.dtype == DType::kFloat8E4M3) time *= kWidened;
      return ceil_div(batch, samples) * time;
    }
    case Path::kLayered: {
      constexpr double kLayer = 8, kGemm = 2e-7;  // two launches; a thread a value
      return kLayer * gemms + read + kGemm * static_cast<double>(multiply_adds(plan, batch, horizon));
    }
    default: return kNever;
  }
}

double layers_time(const Plan& plan, int batch, int horizon, const Device& device) {
  // Of a layer; of one whose norm is a launch of its own and slow: of narrow vectors, or by several blocks; twice that
  // where PyTorch's ops run. Of all weights, which fewer blocks read at a time where widths are no powers of two; of
  // activations, which several kernels read and write; of multiplications. `more_taps`: of the last but activations
  // where a kernel has more than five. Fitted to 80, 59, 22 and 44 calls on an H200, of which 132 multiprocessors share
  // weights and multiplications. In float32 every norm is a launch of its own.
  struct Costs {
    double layer, norm_apart, megaweights, other_megaweights, activations, gemm, more_taps;
  };
  constexpr Costs kWgmma = {5.9, 9.8, 0.42, 1.47, 1.25e-5, 1.4e-9, 1.2},
                  kHalves = {12.8, 23.5, 2.4, 2.4, 1.8e-5, 6.5e-9, 2.0}, kMma = {14, 17, 1.37, 1.7, 5e-6, 6.4e-9, 1},
                  kMmaHalves = {16, 29, 3.5, 3.5, 2.4e-5, 2.84e-8, 1.87};
  const bool float32 = plan.dtype == DType::kFloat32;
  const Costs& of = device.hopper ? (float32 ? kHalves : kWgmma) : float32 ? kMmaHalves : kMma;
  bool powers = true;
  for (int i = 0; i < plan.config.levels; i++) powers = powers && power_of_two(plan.config.width(i).own);
  double layers = 0, values = 0;
  for (const Conv& conv : plan.convs) {
    const int times = horizon >> conv.level_out;
    double layer = of.layer;
    if (conv.norm >= 0) {
      const auto norm = kernels::teams({batch, conv.counted, times, conv.groups}, float32 ? 4 : 2, device.hopper);
      if (norm.ranks > 0 || (!float32 && norm.owned < 4)) layer = of.norm_apart;
      if (!norm.fits()) layer = 2 * of.norm_apart;
    }
    layers += layer;
    values += static_cast<double>(batch) * times * conv.channels_out;
  }
  return layers + of.activations * values +
         (device.hopper ? 1 : 132.0 / device.multiprocessors) * (plan.config.kernel_size > 5 ? of.more_taps : 1) *
             ((powers ? of.megaweights : of.other_megaweights) * weights_of(plan) +
              of.gemm * static_cast<double>(multiply_adds(plan, batch, horizon)));
}

}  // namespace dpa::kernels::unet1d
