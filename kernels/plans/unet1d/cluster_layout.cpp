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
  l.ways = tiles() == kClusters ? 16 : 8;
  return (tiles() == kClusters || tiles() == 2 * kClusters) && l.sample_tiles_log2 <= log2_of(kClusters);
}

// Who finishes what of a tile, or of a cluster's two.
bool choose_units(ClusterLayer& l, const Conv& conv) {
  const int width = conv.norm >= 0 ? conv.channels_out / conv.groups : std::min(conv.channels_out / kSlices, kTileRows);
  l.paired = width == 2 * kTileRows;
  if (width < 16 || width > 2 * kTileRows || !power_of_two(width) || (l.paired && l.ways != 8)) return false;
  if (l.times_log2 < 1 || l.samples_log2 < 1 || l.columns_log2 < (l.samples_log2 == 4 ? 5 : 4)) return false;
  l.rows_log2 = log2_of(width);
  l.group_log2 = l.paired ? 0 : log2_of(kTileRows / width);
  l.pairs_log2 = l.times_log2 - 1;
  l.gap_log2 = std::max(0, 3 - l.samples_log2);
  l.units = 1 << (l.group_log2 + l.samples_log2);
  l.share_log2 = log2_of(std::max(1, l.units / (l.paired ? 16 : l.ways)));
  l.finishers = l.units >> l.share_log2;
  l.inverse_count = 1.0f / static_cast<float>(width << l.times_log2);
  const int unit_threads_log2 = l.rows_log2 + l.times_log2 - 2, threads = 1 << (unit_threads_log2 + l.share_log2);
  l.pitch = threads * 8;
  return unit_threads_log2 >= 5 && threads <= kGroupThreads;
}

bool choose_gemm(ClusterLayer& l, const Plan& plan, const Conv& conv) {
  const Tiling t = tiling(plan, conv);
  if (t.rows % 16 || !power_of_two(t.row_tiles) || t.in % 16 || t.skip % 16) return false;
  if (conv.channels_skip && (conv.channels_skip != conv.channels_in || l.ways != 16)) return false;
  l.packed_tiles_log2 = log2_of(t.row_tiles);
  l.packed_steps = t.steps_per_tap();
  const int shares = l.ways / kSlices, steps = l.packed_steps / shares;
  if (l.packed_steps % shares || !power_of_two(steps)) return false;
  l.steps_log2 = log2_of(steps);
  l.octets = 2 * steps;
  l.slice_octets = t.in / 8;
  l.half_octets = shares == 1 || conv.channels_skip ? 0 : l.octets;
  int reach = 0;
  for (int s = 0; s < conv.num_segments; s++) {
    const Segment& segment = conv.segments[s];
    l.weights[s] = segment.weights, l.taps[s] = segment.taps, l.steps[s] = segment.taps * steps;
    reach = std::max({reach, -segment.first, segment.first + segment.taps - 1});
  }
  if (conv.stride == 2 && (conv.segments[0].taps != 3 || conv.segments[0].first != -1)) return false;
  l.pad = conv.stride == 2 ? 1 : reach;
  const int times = 1 << l.times_in_log2;
  l.rows = (times + l.pad) << l.samples_log2;
  for (int s = 0; s < conv.num_segments; s++) {
    if (l.steps[s] > (s ? kMaxSecondSteps : kMaxSteps)) return false;
    for (int q = 0; q < l.steps[s]; q++) {
      const int tap = q >> l.steps_log2;
      const int row = conv.stride == 1 ? tap + conv.segments[s].first + l.pad : tap == 1 ? times / 2 + 1 : tap / 2;
      l.inputs[s * kMaxSteps + q] = static_cast<uint16_t>((q & (steps - 1)) * 2 * l.rows + (row << l.samples_log2));
    }
  }
  return l.octets << (l.times_in_log2 + l.samples_log2) <= kMaxWords;
}

bool same_output(const ClusterLayer& a, const ClusterLayer& b) {
  return a.ways == b.ways && a.sample_tiles_log2 == b.sample_tiles_log2 && a.row_tiles_log2 == b.row_tiles_log2 &&
         a.samples_log2 == b.samples_log2 && a.times_log2 == b.times_log2 && a.times_out_log2 == b.times_out_log2 &&
         a.upsample == b.upsample && a.rows_log2 == b.rows_log2 && a.share_log2 == b.share_log2;
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
  y.descriptors = take((y.count + 1) * static_cast<int>(sizeof(ClusterLayer)));
  y.buffer = at;
  y.stages = std::min(kMaxClusterStages, (kClusterSharedBytes - at) / kClusterStageBytes);
  y.shared_bytes = at + y.stages * kClusterStageBytes;
}

}  // namespace

ClusterLayout cluster_layout(const Plan& plan, int batch, int horizon) {
  ClusterLayout y;
  const Config& c = plan.config;
  const bool half = plan.dtype == DType::kFloat16 || plan.dtype == DType::kBFloat16;
  if (!half || batch < 1 || plan.slices_in != kSlices || c.num_groups != kSlices || !power_of_two(horizon)) return y;
  y.chunk_log2 = log2_of(std::clamp(batch, kMinSamples, kChunkSamples));
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
    const int times_in = horizon >> conv.level_in, times_out = horizon >> conv.level_out;
    if (times_in < 1 || times_out < 1 || conv.channels_out % kTileRows || !power_of_two(conv.channels_out)) return y;
    l.num_segments = conv.num_segments, l.stride = conv.stride, l.upsample = conv.upsample;
    l.times_in_log2 = log2_of(times_in), l.times_out_log2 = log2_of(times_out);
    l.times_log2 = conv.upsample ? l.times_in_log2 : l.times_out_log2;
    l.channels = conv.channels_out, l.row_tiles_log2 = log2_of(conv.channels_out / kTileRows);
    if (!choose_tiles(l, y.chunk_log2, conv.upsample ? 2 : 1) || !choose_units(l, conv) || !choose_gemm(l, plan, conv))
      return y;
    for (int s = 0; s < 2; s++) l.bias[s] = static_cast<int>(conv.bias[s]);
    l.norm = static_cast<int>(conv.norm), l.film = static_cast<int>(conv.film), l.add = conv.add, l.keep = conv.keep;
    if (i == 1) {
      y.layers[0] = l;
      ClusterLayer& head = y.layers[0];
      head.message = message(c.down_dims[0], horizon);
      head.bias[0] = static_cast<int>(plan.head.bias), head.bias[1] = static_cast<int>(plan.head.residual_bias);
      head.norm = static_cast<int>(plan.head.norm), head.film = static_cast<int>(plan.head.film);
      if (head.share_log2 != 0 || head.channels != c.down_dims[0] || times_out != horizon) return y;
    }
    l.source[0] = l.source[1] = y.layers[i - 1].message;
    if (conv.skip_in >= 0) l.source[1] = y.layers[skips[conv.skip_in]].message;
    if (conv.skip >= 0) skips[conv.skip] = i;
    if (conv.add && !same_output(l, y.layers[residual])) return y;
    if (conv.keep || (conv.num_segments == 2 && !conv.upsample)) residual = i;
    l.message = last ? -1 : message(conv.channels_out, times_out);
  }
  if (!same_output(y.layers[y.count], y.layers[0])) return y;
  for (int i = 1; i <= y.count; i++) {
    const ClusterLayer& next = y.layers[i < y.count ? i + 1 : 1];
    y.layers[i].next_by_all = ClusterTile(next, 0, 0).peers == kClusterBlocks;
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
  if (batch < kMinBatch || c.levels > 3 || (c.kernel_size != 3 && c.kernel_size != 5)) return false;
  if (horizon != 16 && horizon != 8) return false;
  for (int i = 0; i < c.levels; i++)
    if (c.down_dims[i] != 256 << i) return false;
  return cluster_layout(plan, batch, horizon).fits;
}

}  // namespace dpa::kernels::unet1d
