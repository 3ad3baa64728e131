// Chooses how the clustered kernel divides its work, and whether it can.
#include "kernels/plans/unet1d/cluster_layout.h"

#include <algorithm>

namespace dpa::kernels::unet1d {
namespace {

// The tiles of a GEMM: as many samples a tile as there are columns for, but a tile for every cluster.
bool choose_tiles(ClusterLayer& l, int chunk_log2, int segments) {
  l.samples_log2 = std::min(chunk_log2, log2_of(kTileColumns) - l.times_log2);
  if (l.samples_log2 < 0) return false;
  auto tiles = [&] { return segments << (l.row_tiles_log2 + chunk_log2 - l.samples_log2); };
  while (tiles() < kClusters && l.samples_log2 > 0) l.samples_log2--;
  l.sample_tiles_log2 = chunk_log2 - l.samples_log2;
  l.columns_log2 = l.times_log2 + l.samples_log2;
  const int of_cluster = tiles() / kClusters;
  l.ways = of_cluster > 0 ? kClusterBlocks / of_cluster : 0, l.slices = l.ways == 4 ? 2 : 1;
  const bool served = of_cluster == 1 || of_cluster == 2 || (of_cluster == 4 && chunk_log2 == 0);
  return tiles() % kClusters == 0 && served && l.sample_tiles_log2 <= log2_of(kClusters);
}

// Who finishes what of a tile, or of a cluster's two.
bool choose_units(ClusterLayer& l, const Conv& conv, int horizon) {
  const int width = conv.norm >= 0 ? conv.channels_out / conv.groups : std::min(conv.channels_out / kSlices, kTileRows);
  l.paired = width == 2 * kTileRows;
  if (width < 16 || width > 2 * kTileRows || !power_of_two(width) || (l.paired && l.ways != 8)) return false;
  if (l.times_log2 < 1 || l.samples_log2 < 1 || l.columns_log2 < (l.samples_log2 == 4 ? 5 : 4)) return false;
  if (!power_of_two(horizon)) return false;
  l.rows_log2 = log2_of(width);
  l.group_log2 = l.paired ? 0 : log2_of(kTileRows / width);
  l.pairs_log2 = l.times_log2 - 1;
  l.gap_log2 = std::max(0, 3 - l.samples_log2);
  l.pair_steps_log2 = l.pairs_log2 - l.gap_log2, l.step_log2 = l.gap_log2 + 1, l.next_log2 = 0;
  l.units = 1 << (l.group_log2 + l.samples_log2);
  const int units_log2 = log2_of(std::max(1, l.units / (l.paired ? 16 : l.ways)));  // of a finisher
  l.shares_log2 = units_log2 + l.rows_log2 - 4 + l.pairs_log2;
  l.finishers = l.units >> units_log2;
  l.inverse_count = 1.0f / static_cast<float>((conv.norm >= 0 ? conv.counted / conv.groups : width) << l.times_log2);
  const int threads = 8 << l.shares_log2;
  l.pitch = threads * 8;
  return l.rows_log2 + l.times_log2 - 2 >= 5 && threads <= kGroupThreads;
}

// The same of one sample on its own: a cluster has a group, or, without a norm, any channels, and all of its blocks
// finish. A thread of a GEMM has, of every eighth pair of times, one: those are the shares side by side.
bool choose_parts(ClusterLayer& l, const Conv& conv, int horizon) {
  const int tiles = kClusterBlocks / l.ways;  // of a cluster
  if (conv.norm >= 0 && conv.channels_out != conv.groups * tiles * kTileRows) return false;
  l.rows_log2 = log2_of(kTileRows), l.pairs_log2 = l.times_log2 - 1;
  l.pair_steps_log2 = l.columns_log2 - 3, l.step_log2 = 3, l.next_log2 = 1;
  l.units = 1, l.finishers = l.ways;
  l.shares_log2 = l.rows_log2 - 4 + l.pairs_log2 - log2_of(l.ways);
  l.inverse_count = 1.0f / static_cast<float>((conv.norm >= 0 ? conv.counted / conv.groups : tiles * kTileRows) *
                                              (horizon >> conv.level_out));
  l.pitch = 64 << l.shares_log2;
  return l.columns_log2 >= 4 && l.shares_log2 >= 2 && l.shares_log2 <= 4 && l.pair_steps_log2 <= l.shares_log2;
}

bool choose_gemm(ClusterLayer& l, const Plan& plan, const Conv& conv, bool by_stage) {
  const Tiling t = tiling(plan, conv);
  if (t.rows % 16 || !power_of_two(t.row_tiles) || t.in % 16 || t.skip % 16) return false;
  const bool joined = conv.channels_skip > 0;
  if (joined && (conv.channels_skip != conv.channels_in || l.ways == 4)) return false;
  l.packed_tiles_log2 = log2_of(t.row_tiles);
  l.packed_steps = t.steps_per_tap();
  const int shares = l.ways == 16 ? 2 : 1, steps = l.packed_steps / shares;
  if (l.packed_steps % shares || !power_of_two(steps)) return false;
  l.steps_log2 = log2_of(steps);
  l.octets = 2 * steps * l.slices;
  l.first_octets = joined && shares == 1 ? l.octets / 2 : l.octets;
  l.slice_octets = t.in / 8;
  l.half_octets = shares == 1 || joined ? 0 : l.octets;
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
  l.by_stage = by_stage && steps % kStageSteps == 0;
  const int apart = l.by_stage ? kStageSteps : 1;
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
  return l.octets << (l.times_in_log2 + l.samples_log2) <= kMaxWords;
}

bool same_output(const ClusterLayer& a, const ClusterLayer& b) {
  return a.ways == b.ways && a.sample_tiles_log2 == b.sample_tiles_log2 && a.row_tiles_log2 == b.row_tiles_log2 &&
         a.samples_log2 == b.samples_log2 && a.times_log2 == b.times_log2 && a.times_out_log2 == b.times_out_log2 &&
         a.upsample == b.upsample && a.rows_log2 == b.rows_log2 && a.shares_log2 == b.shares_log2;
}

void place(ClusterLayout& y, const Plan& plan, int horizon) {
  int activations = 0, at = 0;
  for (int i = 1; i <= y.count; i++) {
    const ClusterLayer& l = y.layers[i];
    activations = std::max(activations, (l.octets * l.rows + (l.pad << l.samples_log2)) * 16);
    y.sums_bytes = std::max(y.sums_bytes, l.pitch * l.ways);
  }
  auto take = [&](int bytes) {
    const int begin = at;
    at += (bytes + 127) / 128 * 128;
    return begin;
  };
  y.activations = take(activations);
  y.sums = take(2 * y.sums_bytes);
  y.sample = take(horizon * plan.config.action_dim * 4);
  y.head = take(y.alone ? (plan.config.kernel_size + 1) * plan.config.action_dim * 16 * 4 : 0);
  y.descriptors = take((y.count + 1) * static_cast<int>(sizeof(ClusterLayer)));
  y.buffer = at;
  y.stages = std::min(kMaxClusterStages, (kClusterSharedBytes - at) / (kStageSteps * y.step_bytes));
  y.shared_bytes = at + y.stages * kStageSteps * y.step_bytes;
}

}  // namespace

ClusterLayout cluster_layout(const Plan& plan, int batch, int horizon) {
  ClusterLayout y;
  const Config& c = plan.config;
  if (plan.dtype == DType::kFloat32 || batch < 1 || horizon < 1) return y;
  if (plan.slices_in != kSlices || c.num_groups != kSlices || plan.convs.size() > kMaxClusterConvs) return y;
  y.alone = batch == 1 && horizon > kTileColumns / 2;
  y.chunk_log2 = y.alone ? 0 : log2_of(std::clamp(batch, kMinSamples, kChunkSamples));
  y.step_bytes = kTileRows * 16 * element_bytes(plan.dtype);
  const int times_log2 = log2_of(horizon);  // what lies behind the last time is zero
  int residual = 0, skips[kMaxLevels] = {};
  int64_t at = 0;
  auto message = [&](int channels, int times) {
    const int64_t begin = at;
    at += (static_cast<int64_t>(channels) * times << y.chunk_log2) * 2;
    return begin;
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
    if (!choose_tiles(l, y.chunk_log2, conv.upsample ? 2 : 1)) return y;
    if (!(y.alone ? choose_parts(l, conv, horizon) : choose_units(l, conv, horizon)) ||
        !choose_gemm(l, plan, conv, y.alone))
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
      const bool whole = head.shares_log2 > head.rows_log2 - 4 + head.pairs_log2;  // several units
      if (whole || head.channels != c.down_dims[0] || head.times != horizon) return y;
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
    y.layers[i].next_by_all = ClusterTile(next, 0, 0).peers > ClusterTile(y.layers[i], 0, 0).peers;
  }
  y.tail_message = at;
  y.message_bytes = at + (static_cast<int64_t>(horizon) * c.action_dim * (c.down_dims[0] / 16) << y.chunk_log2) * 4;
  constexpr int64_t kKept = 16 << 20;
  y.kept_bytes = kKept;
  place(y, plan, horizon);
  y.fits = y.stages >= kMinClusterStages;
  return y;
}

bool cluster_serves(const Plan& plan, int batch, int horizon) {
  constexpr int kMinBatch = 2;
  const Config& c = plan.config;
  if (c.levels > 3 || (c.kernel_size != 3 && c.kernel_size != 5)) return false;
  const ClusterLayout y = cluster_layout(plan, batch, horizon);
  if (!y.fits || y.alone) return y.fits;
  if (batch < kMinBatch || (horizon != 16 && horizon != 8)) return false;
  for (int i = 0; i < c.levels; i++)
    if (c.down_dims[i] != 256 << i) return false;
  return true;
}

}  // namespace dpa::kernels::unet1d
