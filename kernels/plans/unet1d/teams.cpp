// Walks the plan's GEMMs, gives every value a slab and every GEMM its warps.
#include "kernels/plans/unet1d/teams.h"

#include <algorithm>
#include <map>
#include <vector>

namespace dpa::kernels::unet1d {
namespace {

class TeamBuilder {
 public:
  TeamBuilder(const Plan& p, int n, int t, int teams, int bytes) : plan(p), horizon(t), room(bytes - kTeamStatic) {
    out.teams = std::max(1, std::min(teams, n));
    out.samples = ceil_div(n, out.teams);
    out.teams = ceil_div(n, out.samples);
  }

  TeamPlan build() {
    const Config& c = plan.config;
    if (plan.dtype == DType::kFloat8E4M3) return fail("weights in e4m3 of narrow networks are kept in float16");
    if (c.num_groups % kTeamBlocks) return fail("the groups must be a multiple of 8");
    if (horizon % (1 << (c.levels - 1))) return fail("the horizon must be a multiple of 2^(levels - 1)");
    for (int i = 0; i < c.levels; i++) {
      const int width = c.down_dims[i] / c.num_groups;
      if (width % 4 || width > 128) return fail("a group must have a multiple of 4 channels, at most 128");
    }
    if (c.down_dims[0] / kFinalGroups % 4) return fail("a group must have a multiple of 4 channels");
    element = plan.dtype == DType::kFloat32 ? 4 : 2;
    out.halo = std::max(1, c.kernel_size / 2);
    for (const Conv& conv : plan.convs)
      if (!layout_is_plain(conv)) return fail("a slice of the packed tiles must be a block's channels");
    walk();
    if (!out.error.empty()) return out;
    finish();
    return out;
  }

 private:
  const Plan& plan;
  const int horizon, room;
  TeamPlan out;
  int element = 2;
  std::map<std::vector<int>, int> places;  // times, channels, which of them
  int last = -1;                           // the slab written last

  TeamPlan fail(const char* why) {
    out.error = why;
    return out;
  }
  // Channels of a block in a slab: as the packed tiles have them, whose slices are padded to 16.
  int padded(int channels) const {
    const int own = channels / kTeamBlocks;
    return plan.slices_in == kTeamBlocks ? round_up(own, 16) : own;
  }
  bool layout_is_plain(const Conv& conv) const {
    const int unit = conv.channels_in / conv.slices_in;
    return plan.slices_in == kTeamBlocks || unit % 16 == 0;
  }
  int pitch_of(int channels) const { return padded(channels) * kTeamBlocks * element + 16; }

  // The slab of a value, relative to the first: not the one that is being read; one of its own for a skip connection.
  // Slabs of one shape alone share memory: the zeros around a sample stay.
  int place(int times, int channels, int skip) {
    auto at = [&](int which) {
      const auto [found, made] = places.try_emplace({times, channels, which}, out.slab_bytes);
      if (made) out.slab_bytes += round_up(out.samples * (times + 2 * out.halo) * pitch_of(channels), 128);
      return found->second;
    };
    if (skip >= 0) return last = at(2 + skip);
    const int first = at(0);
    return last = first == last ? at(1) : first;
  }

  void output(TeamPhase& f, int times, int channels, int counted, int groups, int skip) {
    f.times = times;
    f.channels = channels / kTeamBlocks, f.groups = groups / kTeamBlocks;
    f.quads = channels / groups / 4, f.quads_magic = magic_of(f.quads);
    f.counted = counted / groups;  // groups divide the channels
    f.inverse_count = 1.0f / static_cast<float>(times * f.counted);
    f.own_magic = magic_of(f.channels / 4), f.times_magic = magic_of(times);
    f.out = place(times, channels, skip);
    f.out_pitch = pitch_of(channels), f.out_rows = times + 2 * out.halo, f.out_padded = padded(channels);
    f.words = out.words;
    out.words += round_up(out.samples * times * channels, 32);
  }
  // How the warps divide the epilogue: as few a (sample, group) pair as leave a thread at most two items.
  bool pairs(TeamPhase& f) {
    const int most = out.samples * f.groups;
    if (most > kTeamPairs || f.quads > 32) return false;
    for (f.log_pair_warps = 0;; f.log_pair_warps++) {
      f.pass_times = (32 << f.log_pair_warps) / f.quads;
      f.passes = ceil_div(f.columns, f.pass_times);
      const bool last = (most << (f.log_pair_warps + 1)) > kTeamEpilogueWarps;
      if (f.passes <= kTeamPasses || last) break;
    }
    return f.passes <= kTeamPasses;
  }
  // The warps over row tiles and K: a warp's time is its steps and the beginning of every run.
  void warps(TeamPhase& f) {
    int steps = 0, best = -1;
    for (int s = 0; s < f.num_segments; s++) steps += f.segments[s].steps;
    for (int log = 0; log <= 3; log++) {
      const int rows = kPhaseWarps >> log, rounds = ceil_div(f.row_tiles, rows);
      if (rows > 1 && rows / 2 >= f.row_tiles) continue;
      const int time = rounds * (ceil_div(steps, 1 << log) * (20 + 10 * f.column_tiles) + 80 * f.num_segments) +
                       (10 << log) * f.passes;
      if (best >= 0 && time >= best) continue;
      best = time, f.warps_rows = rows, f.log_warps_k = log, f.rounds = rounds;
    }
  }
  bool columns(TeamPhase& f) {
    const int all = out.samples * f.columns;
    for (f.column_tiles = 1; f.column_tiles * 8 < all;) f.column_tiles *= 2;
    return all <= kTeamColumns;
  }

  void walk() {
    const Config& c = plan.config;
    int value, skips[kMaxLevels] = {};
    TeamPhase head;
    head.columns = horizon, head.norm = static_cast<int>(plan.head.norm), head.film = static_cast<int>(plan.head.film);
    head.num_segments = 2, head.row_tiles = ceil_div(c.down_dims[0] / kTeamBlocks, 16);
    head.segments[0].taps = c.kernel_size, head.segments[0].bias = static_cast<int>(plan.head.bias);
    head.segments[1].taps = 1, head.segments[1].bias = static_cast<int>(plan.head.residual_bias);
    output(head, horizon, c.down_dims[0], c.width(0).own, c.num_groups, -1);
    value = head.out;
    if (!columns(head) || !pairs(head)) return void(fail("too many values a block"));
    out.phases.push_back(head);
    for (const Conv& conv : plan.convs) {
      TeamPhase f;
      f.value = value, f.pitch = pitch_of(conv.channels_in), f.rows = (horizon >> conv.level_in) + 2 * out.halo;
      if (conv.skip_in >= 0) f.joined = 1, f.skip = skips[conv.skip_in];
      gemm(f, conv);
      f.norm = static_cast<int>(conv.norm), f.film = static_cast<int>(conv.film), f.add = conv.add, f.keep = conv.keep;
      const bool last = &conv == &plan.convs.back();
      output(f, horizon >> conv.level_out, conv.channels_out, conv.counted, conv.norm >= 0 ? conv.groups : c.num_groups,
             conv.skip);
      if (last) out.words = f.words;  // it is handed to the tail
      if (!columns(f) || !pairs(f)) return void(fail("too many values a block"));
      warps(f);
      value = f.out;
      if (conv.skip >= 0) skips[conv.skip] = f.out;
      out.phases.push_back(f);
    }
    out.words += kTeamBlocks * round_up(out.samples * horizon * c.action_dim, 32);
  }
  void gemm(TeamPhase& f, const Conv& conv) {
    const int unit = conv.channels_in / conv.slices_in, own = conv.channels_out / kTeamBlocks;
    f.units = conv.slices_in, f.unit_padded = round_up(unit, 16);
    f.num_segments = conv.num_segments, f.upsample = conv.upsample, f.time_stride = conv.stride;
    f.columns = horizon >> (conv.upsample ? conv.level_in : conv.level_out);
    f.slice_tiles = tiling(plan, conv).row_tiles;
    for (int r = 0; r < kTeamBlocks; r++)
      f.row_tiles = std::max(f.row_tiles, ceil_div((r + 1) * own, 16) - r * own / 16);
    for (int s = 0; s < conv.num_segments; s++) {
      TeamSegment& g = f.segments[s];
      g.weights = conv.segments[s].weights, g.taps = conv.segments[s].taps, g.first = conv.segments[s].first;
      g.bias = static_cast<int>(conv.bias[s]);
      g.steps = f.units * g.taps * (1 + f.joined) * (f.unit_padded / 16);
      if (g.steps % 2 || f.slice_tiles >= 1 << 9 || plan.tile_bytes / element_bytes(plan.dtype) >= 256 << 22)
        fail("a warp takes pairs of steps");
    }
  }

  // An earlier phase whose columns and steps lie as those of `f` do.
  const TeamPhase* table_of(const TeamPhase& f) const {
    for (const TeamPhase* g = &out.phases[1]; g < &f; g++) {
      bool same = !f.joined && !g->joined && f.num_segments == g->num_segments && f.columns == g->columns &&
                  f.time_stride == g->time_stride && f.rows == g->rows && f.pitch == g->pitch && f.units == g->units;
      for (int s = 0; same && s < f.num_segments; s++) same = f.segments[s].taps == g->segments[s].taps;
      if (same) return g;
    }
    return nullptr;
  }

  void finish() {
    const Config& c = plan.config;
    const int values = out.samples * horizon * c.action_dim, own = c.down_dims[0] / kTeamBlocks;
    TeamShared& s = out.shared;
    const int tile_bytes = 256 * element_bytes(plan.dtype), tiles = team_slot_tiles(tile_bytes);
    int tables = 0, sums = 0;
    for (TeamPhase& f : out.phases) {
      const bool head = &f == &out.phases.front();
      const TeamPhase* same = table_of(f);
      f.table = same ? same->table : tables;
      if (!same) tables += round_up(out.samples * f.columns, 2) * 4;
      const int parts = head ? kPhaseWarps : 1 << f.log_warps_k;
      sums = std::max(sums, parts * out.samples * f.columns * (f.row_tiles * 16 + 4));
      if (head) continue;
      for (int i = 0; i < f.num_segments; i++) {
        if (!same) tables += f.segments[i].steps * 4;
        out.warp_loads += f.rounds * ceil_div(ceil_div(f.segments[i].steps, tiles), 1 << f.log_warps_k);
      }
    }
    out.sum_segment = sums;
    Places<int> put = {16};
    s.table = put(static_cast<int>(out.phases.size() * sizeof(TeamPhase)));
    s.loads = put(kPhaseWarps * std::max(1, out.warp_loads) * 4);
    const int first = put(tables);
    for (TeamPhase& f : out.phases) f.table += first;
    s.tail_values = put(out.samples * horizon * (own + 4) * 4);
    s.tail_words = put(kTeamBlocks * values * 4);
    s.sample = put(out.samples * (horizon + 2 * out.halo) * c.action_dim * 4);
    s.head = put(((c.kernel_size + 2) * c.action_dim) * own * 4);
    s.sums = put(2 * sums * 4);
    s.statistics = put(kTeamEpilogueWarps * 16);
    put.at = round_up(put.at, 128);
    s.slabs = put(out.slab_bytes);
    s.buffer = round_up(put.at, 128);
    const int slot = tiles * tile_bytes * kPhaseWarps;
    const TeamSlots slots = team_slots(tile_bytes);
    for (int n : {slots.most, slots.middle, slots.least})
      if (out.buffer_slots == 0 && s.buffer + n * slot <= room) out.buffer_slots = n;
    s.bytes = s.buffer + out.buffer_slots * slot;
    if (out.buffer_slots == 0) out.error = "a team's values do not fit into shared memory";
    for (TeamPhase& f : out.phases) f.value += s.slabs, f.skip += s.slabs, f.out += s.slabs;
  }
};

}  // namespace

TeamPlan make_teams(const Plan& plan, int batch, int horizon, int teams, int shared) {
  return TeamBuilder(plan, batch, horizon, teams, shared).build();
}

size_t team_workspace_bytes(const TeamPlan& plan) {
  return static_cast<size_t>(plan.teams) * plan.words * sizeof(uint32_t) + 128;
}

double team_time(const TeamPlan& plan, DType dtype, int horizon) {
  // A hand-over, which grows with the columns, and the stream of a block's weights, which a small buffer slows down.
  constexpr double kHandover = 1.0, kTime = 0.022, kMegabyte = 12, kMegabyteFloat32 = 15, kTwoSlots = 12,
                   kThreeSlots = 3.5, kSample = 0.2;
  double megabytes = 0;
  for (const TeamPhase& f : plan.phases)
    for (int s = 0; s < f.num_segments; s++)
      megabytes += f.segments[s].steps * f.row_tiles * 256e-6 * element_bytes(dtype);
  const double stream =
      (dtype == DType::kFloat32 ? kMegabyteFloat32 : kMegabyte) + (plan.buffer_slots < 3   ? kTwoSlots
                                                                   : plan.buffer_slots < 4 ? kThreeSlots
                                                                                           : 0);
  const double handovers = static_cast<double>(plan.phases.size()) * (kHandover + kTime * horizon);
  return (handovers + megabytes * stream) * (1 + kSample * (plan.samples - 1));
}

TeamCall team_parts(const Plan& plan, int batch, int horizon, int teams, int shared) {
  TeamCall best = {true, teams};
  if (batch < 1 || horizon < 1 || teams < 1) return best;
  for (int each = 1; each == 1 || teams * (each - 1) < batch; each++) {  // samples of a team
    const int launches = ceil_div(batch, teams * each), samples = ceil_div(batch, launches);
    const TeamPlan made = make_teams(plan, samples, horizon, teams, shared);
    if (!made.error.empty()) break;
    const double time = launches * team_time(made, plan.dtype, horizon);
    if (best.samples == 0 || time < best.time) best.samples = samples, best.time = time;
  }
  return best;
}

TeamCall team_call(const Plan& plan, int batch, int horizon, const Device& device) {
  constexpr double kWords = 1.25;  // the time by words, clusters 1
  const TeamCall clusters = team_parts(plan, batch, horizon, device.team_clusters, device.shared_bytes);
  TeamCall words = team_parts(plan, batch, horizon, device.multiprocessors / kTeamBlocks, device.shared_bytes);
  words.clusters = false, words.time *= kWords;
  return clusters.samples > 0 && (words.samples == 0 || clusters.time <= words.time) ? clusters : words;
}

}  // namespace dpa::kernels::unet1d
