// Chooses how the clustered kernel divides its work, and whether it can.
#include "kernels/plans/unet1d/cluster_layout.h"

#include <algorithm>

namespace dpa::kernels::unet1d {
namespace {

constexpr int kMaxHeadBytes = 12 << 10;  // of the first convolution's weights in shared memory
constexpr int kShareLog2 = 5;            // of a share's values

// The tiles of a GEMM: as many samples a tile as there are columns for, and at most 1 << most_log2, but a tile for every
// cluster.
bool choose_tiles(ClusterLayer& l, int chunk_log2, int most_log2) {
  l.samples_log2 = std::min(most_log2, log2_of(kTileColumns) - l.times_log2);
  if (l.samples_log2 < 0) return false;
  auto tiles_log2 = [&] { return l.upsample + l.row_tiles_log2 + chunk_log2 - l.samples_log2; };
  while (1 << tiles_log2() < kClusters && l.samples_log2 > 0) l.samples_log2--;
  l.columns_log2 = l.times_log2 + l.samples_log2;
  l.tiles_log2 = tiles_log2() - log2_of(kClusters);
  l.ways = l.tiles_log2 < 0 ? 0 : kClusterBlocks >> l.tiles_log2;
  return l.ways >= 2;
}

// The most samples that a tile has but for upsampling GEMMs, which have twice as many tiles, and so could do with more
// samples a tile than any other. A block would then read words of blocks of which no other GEMM tells it that they have
// made those of the last step unwritten.
int most_samples_log2(const Plan& plan, int chunk_log2, int times_log2) {
  int most = 0;
  for (const Conv& conv : plan.convs) {
    if (conv.upsample) continue;
    ClusterLayer l = {};
    l.times_log2 = times_log2 - conv.level_out, l.row_tiles_log2 = log2_of(conv.channels_out / kTileRows);
    if (choose_tiles(l, chunk_log2, chunk_log2)) most = std::max<int>(most, l.samples_log2);
  }
  return most;
}

// Who finishes what of a tile, or of neighbouring ones.
bool choose_units(ClusterLayer& l, const Conv& conv, int horizon) {
  const int tile_log2 = log2_of(kTileRows), ways_log2 = log2_of(l.ways);
  l.rows_log2 = log2_of(conv.channels_out / kSlices);
  // Without moments, who finishes a part of a unit hears of its own tile's blocks alone, and may acknowledge only to
  // those (AckTargets). So a unit spans no tiles without a norm, but where a norm's blocks add the values later.
  if (conv.norm < 0 && !conv.keep) l.rows_log2 = std::min<int>(l.rows_log2, tile_log2);
  if (l.rows_log2 < 4 || l.rows_log2 > tile_log2 + l.tiles_log2) return false;
  if (l.times_log2 < 1 || l.columns_log2 < (l.samples_log2 == 4 ? 5 : 4)) return false;
  l.span_log2 = std::max(0, l.rows_log2 - tile_log2), l.group_log2 = std::max(0, tile_log2 - l.rows_log2);
  l.pairs_log2 = l.times_log2 - 1;
  // A thread of a GEMM has, of one sample, neighbouring times of every eighth pair; of more, times that are a gap apart.
  const bool one = l.samples_log2 == 0;
  l.gap_log2 = one ? 0 : std::max(0, 3 - l.samples_log2);
  l.pair_steps_log2 = one ? l.columns_log2 - 3 : l.pairs_log2 - l.gap_log2;
  l.step_log2 = one ? 3 : l.gap_log2 + 1, l.next_log2 = one ? 1 : 0;
  const int units_log2 = l.group_log2 + l.samples_log2, peers_log2 = ways_log2 + l.span_log2;
  const int unit_log2 = l.rows_log2 + l.times_log2 - kShareLog2;  // shares of a unit
  l.units = 1 << units_log2;
  // What a norm's blocks add later, they keep: it is finished as that norm's units are.
  const bool alike = conv.norm >= 0 || conv.keep;
  const bool spread = 1 << unit_log2 > kGroupThreads / 8 || (!alike && units_log2 + unit_log2 >= peers_log2 + 2),
             whole = !spread;
  const int mine_log2 = whole ? std::max(0, units_log2 - peers_log2) : units_log2 - peers_log2;  // units of a finisher
  l.shares_log2 = mine_log2 + unit_log2;
  l.finishers = whole ? l.units >> mine_log2 : 1 << peers_log2;
  l.exchange_log2 = conv.norm >= 0 || l.span_log2 > 0 ? std::max(0, -mine_log2) : 0;
  l.rounds_log2 = std::max(0, l.shares_log2 - log2_of(kGroupThreads / 8));
  const int groups = conv.norm >= 0 ? conv.groups : kSlices, width = conv.channels_out / groups;
  if (!power_of_two(width) || width < 16 || groups < kSlices) return false;
  l.group_shares_log2 = log2_of(width) + l.times_log2 - kShareLog2;
  l.inverse_count = 1.0f / static_cast<float>((horizon >> conv.level_out) *
                                              (conv.norm >= 0 ? conv.counted / groups : 1 << l.rows_log2));
  l.pitch = 64 << l.shares_log2;
  if (conv.norm >= 0 && mine_log2 > 0) return false;  // a block has the moments of one unit
  return l.shares_log2 >= 2 && l.rounds_log2 <= std::min<int>(kMaxRoundsLog2, l.pair_steps_log2);
}

// How a block's part of K is cut into passes, whose inputs fit into its shared memory.
bool choose_passes(ClusterLayer& l, const Tiling& t, int taps, bool joined, int max_words) {
  const int columns_log2 = l.times_in_log2 + l.samples_log2;
  auto octets = [&] { return 2 * l.packed_steps >> l.parts_log2; };
  auto fits = [&](int slices) {
    return slices * octets() << columns_log2 <= max_words && slices * taps * octets() / 2 <= kStageSteps * kMaxInputs;
  };
  while (kSlices << l.parts_log2 < l.ways || !fits(1)) l.parts_log2++;
  if (octets() < 2) return false;
  l.passes = (kSlices << l.parts_log2) / l.ways;
  l.slices = !joined && l.parts_log2 == 0 && l.passes > 1 && fits(2) ? 2 : 1;
  l.passes /= l.slices;
  l.steps_log2 = log2_of(octets() / 2);
  l.slice_octets = t.in / 8;
  l.octets = octets() * l.slices;
  l.first_octets = joined && l.parts_log2 == 0 ? l.slice_octets : l.octets;
  return true;
}

bool choose_gemm(ClusterLayer& l, const Plan& plan, const Conv& conv, int max_words) {
  const Tiling t = tiling(plan, conv);
  if (t.rows % 16 || !power_of_two(t.row_tiles) || t.in % 16 || t.skip % 16) return false;
  const bool joined = conv.channels_skip > 0;
  if (joined && conv.channels_skip != conv.channels_in) return false;
  l.packed_tiles_log2 = log2_of(t.row_tiles);
  l.packed_steps = t.steps_per_tap();
  if (!power_of_two(l.packed_steps) || !choose_passes(l, t, conv.segments[0].taps, joined, max_words)) return false;
  const int steps = 1 << l.steps_log2;
  int reach = 0;
  for (int s = 0; s < conv.num_segments; s++) {
    const Segment& segment = conv.segments[s];
    l.weights[s] = segment.weights, l.taps[s] = segment.taps, l.steps[s] = segment.taps * steps * l.slices;
    reach = std::max({reach, -segment.first, segment.first + segment.taps - 1});
  }
  if (conv.stride == 2 && (conv.segments[0].taps != 3 || conv.segments[0].first != -1)) return false;
  l.pad = conv.stride == 2 ? 1 : reach;
  const int times = 1 << l.times_in_log2;
  l.rows = (times + l.pad) << l.samples_log2;
  l.by_stage = l.steps[0] > kMaxInputs || l.steps[1] > kMaxSecondInputs;
  const int apart = l.by_stage ? kStageSteps : 1;
  if (steps % apart) return false;
  for (int s = 0; s < conv.num_segments; s++) {
    if (l.steps[s] > apart * (s ? kMaxSecondInputs : kMaxInputs)) return false;
    const int of_slice = l.taps[s] * steps;
    for (int q = 0; q < l.steps[s]; q += apart) {
      const int slice = q / of_slice, tap = q % of_slice >> l.steps_log2,
                octet = 2 * ((q & (steps - 1)) + slice * steps);
      const int row = conv.stride == 1 ? tap + conv.segments[s].first + l.pad : tap == 1 ? times / 2 + 1 : tap / 2;
      l.inputs[s * kMaxInputs + q / apart] = static_cast<uint16_t>(octet * l.rows + (row << l.samples_log2));
    }
  }
  return true;
}

bool same_output(const ClusterLayer& a, const ClusterLayer& b) {
  return a.ways == b.ways && a.row_tiles_log2 == b.row_tiles_log2 && a.samples_log2 == b.samples_log2 &&
         a.times_log2 == b.times_log2 && a.times_out_log2 == b.times_out_log2 && a.upsample == b.upsample &&
         a.rows_log2 == b.rows_log2 && a.shares_log2 == b.shares_log2 && a.span_log2 == b.span_log2;
}

// Whether a slice is several GroupNorm groups anywhere.
bool several_groups(const ClusterLayout& y) {
  return std::any_of(y.layers, y.layers + y.count + 1, [](const ClusterLayer& l) {
    return l.norm >= 0 && l.group_shares_log2 < l.rows_log2 + l.times_log2 - kShareLog2;
  });
}

void place(ClusterLayout& y, const Plan& plan, int horizon) {
  int activations = 0;
  for (int i = 1; i <= y.count; i++) {
    const ClusterLayer& l = y.layers[i];
    activations = std::max(activations, (l.octets * l.rows + (l.pad << l.samples_log2)) * 16);
    y.sums_bytes = std::max(y.sums_bytes, l.pitch * l.ways);
  }
  Places<int> take = {128};
  const bool several = std::any_of(y.layers + 1, y.layers + y.count + 1, [](const auto& l) { return l.passes > 1; });
  y.activation_bytes = round_up(activations, 128);
  y.activations = take(y.activation_bytes * (several ? 2 : 1));
  y.sums = take(2 * y.sums_bytes);
  y.sample = take(horizon * plan.config.action_dim * 4);
  const ClusterLayer& first = y.layers[0];
  y.head_channels = 16 << std::max(0, first.shares_log2 - first.pairs_log2);
  const int head = (plan.config.kernel_size + 1) * plan.config.action_dim * y.head_channels * 4;
  if (head > kMaxHeadBytes) y.head_channels = 0;
  y.head = take(y.head_channels > 0 ? head : 0);
  y.descriptors = take((y.count + 1) * static_cast<int>(sizeof(ClusterLayer)));
  y.buffer = take.at;
  y.stages = std::min(kMaxClusterStages, (kClusterSharedBytes - (several_groups(y) ? kMomentBytes : 0) - y.buffer) /
                                             (kStageSteps * y.step_bytes));
  y.shared_bytes = y.buffer + y.stages * kStageSteps * y.step_bytes;
}

// whole: whether every time is one of the signal's.
ClusterForm form_of(const ClusterLayout& y, bool whole) {
  constexpr int kBlocksLog2 = 4;  // of a cluster
  auto all = [&](auto holds) { return std::all_of(y.layers, y.layers + y.count + 1, holds); };
  const bool at_once = all([](const ClusterLayer& l) { return l.passes == 1 && l.rounds_log2 == 0; });
  if (several_groups(y)) return ClusterForm::kGroups;
  if (at_once && y.chunk_log2 == 0 && y.head_channels == 16 &&
      all([](const ClusterLayer& l) { return l.norm < 0 || l.exchange_log2 == kBlocksLog2; }))
    return ClusterForm::kAlone;
  if (at_once && whole &&
      all([](const ClusterLayer& l) { return l.samples_log2 > 0 && l.exchange_log2 == 0 && l.ways >= kWholeWays; }))
    return ClusterForm::kWhole;
  return all([](const ClusterLayer& l) { return l.rounds_log2 == 0; }) ? ClusterForm::kPasses : ClusterForm::kRounds;
}

// max_words: of a pass.
ClusterLayout layout_of_passes(const Plan& plan, int batch, int horizon, int max_words) {
  ClusterLayout y;
  const Config& c = plan.config;
  if (plan.dtype == DType::kFloat32 || batch < 1 || horizon < 1) return y;
  if (plan.slices_in != kSlices) return y;
  y.chunk_log2 = log2_of(std::clamp(batch, horizon <= 16 ? kMinSamples : 1, kChunkSamples));
  y.step_bytes = kTileRows * 16 * element_bytes(plan.dtype);
  // What lies behind the last time is zero; the last level has two times.
  const int times_log2 = std::max(log2_of(horizon), c.levels);
  while (y.chunk_log2 + times_log2 - (c.levels - 1) < 4 && y.chunk_log2 < 4) y.chunk_log2++;  // 16 columns in a tile
  const int most_log2 = most_samples_log2(plan, y.chunk_log2, times_log2);
  int residual = 0, skips[kMaxLevels] = {};
  Places<int64_t> take = {1};
  auto message = [&](int channels, int times) {
    return take((static_cast<int64_t>(channels) * times << y.chunk_log2) * 2);
  };
  for (const Conv& conv : plan.convs) {
    const int i = ++y.count;
    ClusterLayer& l = y.layers[i];
    const bool last = i == static_cast<int>(plan.convs.size());
    l.times_in_log2 = times_log2 - conv.level_in, l.times_out_log2 = times_log2 - conv.level_out;
    if (l.times_in_log2 < 0 || l.times_out_log2 < 0) return y;
    if (conv.channels_out % kTileRows || !power_of_two(conv.channels_out)) return y;
    l.num_segments = conv.num_segments, l.stride = conv.stride, l.upsample = conv.upsample;
    l.times = horizon >> conv.level_out;
    l.times_log2 = conv.upsample ? l.times_in_log2 : l.times_out_log2;
    l.channels = conv.channels_out, l.row_tiles_log2 = log2_of(conv.channels_out / kTileRows);
    if (!choose_tiles(l, y.chunk_log2, most_log2) || !choose_units(l, conv, horizon) ||
        !choose_gemm(l, plan, conv, max_words))
      return y;
    for (int s = 0; s < 2; s++) {
      l.bias[s] = static_cast<int>(conv.bias[s]);
      l.scale[s] = conv.scale < 0 ? -1 : static_cast<int>(conv.scale) + s * conv.channels_out;
    }
    l.norm = static_cast<int>(conv.norm), l.film = static_cast<int>(conv.film), l.add = conv.add, l.keep = conv.keep;
    if (i == 1) {
      y.layers[0] = l;
      ClusterLayer& head = y.layers[0];
      head.message = message(c.down_dims[0], 1 << times_log2);
      head.bias[0] = static_cast<int>(plan.head.bias), head.bias[1] = static_cast<int>(plan.head.residual_bias);
      head.norm = static_cast<int>(plan.head.norm), head.film = static_cast<int>(plan.head.film);
      if (head.channels != c.down_dims[0] || head.times != horizon) return y;
    }
    l.source[0] = l.source[1] = y.layers[i - 1].message;
    if (conv.skip_in >= 0) l.source[1] = y.layers[skips[conv.skip_in]].message;
    if (conv.skip >= 0) skips[conv.skip] = i;
    if (conv.add && !same_output(l, y.layers[residual])) return y;
    if (conv.keep || (conv.num_segments == 2 && !conv.upsample)) residual = i;
    l.message = last ? -1 : message(conv.channels_out, 1 << l.times_out_log2);
  }
  if (!same_output(y.layers[y.count], y.layers[0])) return y;
  for (int i = 1; i <= y.count; i++) {
    const ClusterLayer& next = y.layers[i < y.count ? i + 1 : 1];
    y.layers[i].next_peers = static_cast<int16_t>(ClusterTile(next, 0, 0).peers);
  }
  y.tail_message = take.at;
  y.message_bytes =
      take.at + (static_cast<int64_t>(horizon) * c.action_dim * (c.down_dims[0] / 16) << y.chunk_log2) * 4;
  y.kept_bytes = 16 << 20;
  place(y, plan, horizon);
  y.form = form_of(y, horizon == 1 << times_log2);
  y.fits = y.stages >= kMinClusterStages;
  return y;
}

}  // namespace

// As large passes as leave room for enough of the weights' stages.
ClusterLayout cluster_layout(const Plan& plan, int batch, int horizon) {
  ClusterLayout y;
  for (int words = kMaxWords; words >= kMaxWords / 4 && !y.fits; words /= 2)
    y = layout_of_passes(plan, batch, horizon, words);
  return y;
}

bool cluster_serves(const Plan& plan, int batch, int horizon) {
  constexpr int kLeastWidth = 256;
  constexpr int kMostTiles = 4;    // of a cluster: with 8, layers in launches of their own are faster
  constexpr int kMostWhole = 32;   // samples: then there are two launches
  constexpr int kLeastAlone = 33;  // times: below, the one-sample resident kernel is faster
  const Config& c = plan.config;
  if (c.kernel_size < 3 || c.kernel_size > 7) return false;
  for (int i = 0; i < c.levels; i++)
    if (c.down_dims[i] < kLeastWidth) return false;
  const ClusterLayout y = cluster_layout(plan, batch, horizon);
  if (!y.fits) return false;
  const bool few_tiles = std::all_of(y.layers + 1, y.layers + y.count + 1,
                                     [](const ClusterLayer& l) { return 1 << l.tiles_log2 <= kMostTiles; });
  if (batch == 1) {
    const bool alone =
        y.form == ClusterForm::kAlone || (y.form == ClusterForm::kGroups && y.chunk_log2 == 0 && few_tiles);
    return alone && horizon >= kLeastAlone;
  }
  const bool whole = y.form == ClusterForm::kWhole && c.down_dims[0] == kLeastWidth && c.kernel_size < 7;
  return batch <= (whole ? kMostWhole : kChunkSamples) && few_tiles;
}

}  // namespace dpa::kernels::unet1d
