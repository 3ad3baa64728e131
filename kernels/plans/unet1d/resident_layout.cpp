// Chooses how the resident kernel divides its work, and whether it can.
#include "kernels/plans/unet1d/resident_layout.h"

#include <algorithm>

namespace dpa::kernels::unet1d {
namespace {

// Whether a GEMM's sums fit a warp's share of the partial sums, and its messages the threads' rounds.
bool solo_room(bool bulk, bool wide, int pairs, int row_tiles, int columns) {
  if (!bulk) return true;
  const int words = wide ? 1 : 2, rounds = ceil_div(pairs, words);  // words: sums in a message word
  return columns * (16 * row_tiles + 4) <= kSoloShareFloats * pairs &&
         columns * row_tiles * 16 / words <= kConsumerWarps * 32 * rounds;
}

// The channel pairs a thread that the one-sample kernel is compiled for, for `most` of them; 0: none.
int solo_pairs(int most) { return most <= 4 ? most : 0; }

// Fills in the descriptors of the one-sample kernel; false where it has no code for a shape.
bool solo_layers(ResidentLayout& r, int pairs, bool wide, bool bulk) {
  const int element = 2, step_bytes = 16 * element, pack = wide ? 1 : 2;             // pack: sums a message word
  const int block = kSlicesIn * static_cast<int>(solo_message_stride(pairs, wide));  // words of a GEMM's output
  int message = 0, second_message = -1;
  for (int i = 0; i <= r.count; i++) {
    const ResidentLayer& l = r.layers[i];
    SoloLayer& s = r.solo[i] = {};
    const int width = l.channels_out / kSlicesIn;
    if (!power_of_two(width) || width < 2 || l.counted % (2 * kSlicesIn)) return false;
    s.residual_message = l.residual_message < 0 ? -1 : second_message;
    s.channels = l.channels_out, s.half_log2 = log2_of(width / 2), s.pairs = l.times_out * width / 2;
    s.bias = l.bias[0], s.other_bias = l.other_bias, s.norm = l.norm, s.film = l.film, s.skip_out = l.skip_out;
    s.flags = (l.add ? kSoloAdd : 0) | (l.keep ? kSoloKeep : 0);
    s.message = message;
    s.counted = l.counted / kSlicesIn / 2;
    s.inverse_count = 0.5f / static_cast<float>(l.times_out * s.counted);
    if (i == 0) continue;
    message += block;
    second_message = l.num_segments == 2 && !l.upsample ? message : -1;
    if (second_message >= 0) message += block;
    const int least = ceil_div(l.columns_per_sample, 8), column_tiles = least + (least > 2 && least % 2),
              row_tiles = 1 << l.row_tiles_log2;
    if (width % 16 || !solo_has_shape(bulk, wide, pairs, row_tiles, column_tiles) || r.halo > 4) return false;
    if (!solo_room(bulk, wide, pairs, row_tiles, l.columns_per_sample)) return false;
    r.share = std::max(r.share, l.columns_per_sample * (16 * row_tiles + 4));
    s.pitch = l.steps_per_tap * step_bytes + 16, s.input = r.input + r.halo * s.pitch,
    s.last_row = s.input + l.times_in * s.pitch;
    s.skip_in = l.skip_in, s.skip_bytes = l.skip_channel * element;
    s.stride = l.stride * s.pitch, s.columns = l.columns_per_sample;
    s.steps_per_tap = l.steps_per_tap, s.steps_inverse = l.steps_inverse,
    s.tap_bytes = s.pitch - l.steps_per_tap * step_bytes;
    s.shape = row_tiles << 4 | column_tiles;
    s.scale = l.scale;
    s.out_stride = (l.upsample ? 2 * l.channels_out : l.channels_out) / pack;
    for (int k = 0; k < l.num_segments; k++) {
      s.steps[k] = l.tiles[k] / row_tiles, s.first[k] = l.first[k] * s.pitch;
      s.out[k] = (k && second_message >= 0 ? second_message : s.message) + (l.upsample ? k * l.channels_out / pack : 0);
    }
  }
  r.pairs = pairs, r.tail_message = message;
  return true;
}

// Which weights are asked to stay in L2 from step to step. Where memory's bandwidth decides, which it does in the wide
// layers, a part of every wide layer, but for those that the circular buffers hold when a step comes to them. Otherwise
// the first ones. A larger network gains nothing by it.
void keep_weights(ResidentLayout& r, const Plan& plan) {
  constexpr int64_t kKept = 14 << 20, kKeepBelow = 256 << 20;
  if (plan.tile_bytes >= kKeepBelow) return;
  r.kept_end = 16 << 20;
  if (plan.dtype == DType::kFloat8E4M3 || r.pairs == 0) return;
  auto bytes = [&](const ResidentLayer& l) {
    return int64_t{l.tiles[0] + (l.num_segments == 2 ? l.tiles[1] : 0)} * r.tile_bytes * r.blocks;
  };
  int64_t widest = 0, buffered = int64_t{r.stages} * r.stage_bytes * r.blocks;
  for (int i = 1; i <= r.count; i++) widest = std::max(widest, bytes(r.layers[i]));
  int64_t begin = -1, end = 0;
  for (int i = 1; i <= r.count; i++) {
    const ResidentLayer& l = r.layers[i];
    if (2 * bytes(l) < widest) continue;
    if (buffered <= 0) {
      if (begin < 0) begin = l.weights[0];
      end = l.weights[0] + bytes(l);
    }
    buffered -= bytes(l);
  }
  if (end - begin < kKept) return;
  r.kept_begin = begin, r.kept_end = end, r.kept_every = static_cast<int>((end - begin + kKept - 1) / kKept);
}

}  // namespace

ResidentLayout resident_layout(const Plan& plan, int batch, int horizon, const Device& device) {
  ResidentLayout r;
  const Config& c = plan.config;
  const bool bulk = device.hopper;
  if (plan.slices_in != kSlicesIn || c.num_groups != kSlicesIn || batch < 1) return r;
  int slices_out = plan.slices_out;
  while (!bulk && slices_out > 1 && slices_out * kSlicesIn > device.multiprocessors) slices_out /= 2, r.merged_log2++;
  if (slices_out << r.merged_log2 != plan.slices_out) return r;
  r.blocks = slices_out * kSlicesIn;
  r.stage_bytes = bulk ? kBulkStageBytes : kAsyncStageBytes;
  r.halo = std::max(c.kernel_size / 2, 1);
  const bool wide = plan.dtype == DType::kFloat32;
  const int element = 2, threads = kConsumerWarps * 32;  // element: bytes of an activation, or of its high half
  r.tile_bytes = 256 * element_bytes(plan.dtype);

  int input_bytes = 0, units = 0, partial_bytes = 0, skip_bytes[kMaxLevels] = {};
  auto units_of = [&](int channels, int times) {
    return batch * ceil_div(times * channels / kSlicesIn / 2, threads) * threads;
  };
  units = units_of(c.down_dims[0], horizon);
  int64_t message = 0;
  ResidentLayer& head = r.layers[0];
  head.times_out = horizon, head.channels_out = c.down_dims[0], head.counted = c.own(c.down_dims[0]);
  head.bias[0] = static_cast<int>(plan.head.bias), head.other_bias = static_cast<int>(plan.head.residual_bias);
  head.residual_message = -1;
  head.norm = static_cast<int>(plan.head.norm), head.film = static_cast<int>(plan.head.film);
  head.skip_out = head.skip_in = -1;
  for (const Conv& conv : plan.convs) {
    Tiling t = tiling(plan, conv);
    t.rows <<= r.merged_log2, t.row_tiles <<= r.merged_log2;
    ResidentLayer& l = r.layers[++r.count];
    if (t.rows % 16 || !power_of_two(t.row_tiles) || t.in % 2) return r;
    if (t.row_tiles > (bulk ? kConsumerWarps : 2 * kConsumerWarps)) return r;
    l.row_tiles_log2 = log2_of(t.row_tiles);
    l.num_segments = conv.num_segments;
    l.times_in = horizon >> conv.level_in, l.times_out = horizon >> conv.level_out;
    l.columns_per_sample = conv.upsample ? l.times_in : l.times_out;
    l.stride = conv.stride, l.upsample = conv.upsample, l.channels_out = conv.channels_out, l.counted = conv.counted;
    const int column_tiles = ceil_div(batch * l.columns_per_sample, 8);
    int column_warps = 1;
    while (column_warps * t.row_tiles < kConsumerWarps && ceil_div(column_tiles, column_warps) > (wide ? 2 : 4))
      column_warps *= 2;
    l.column_tiles = 1 << log2_of(ceil_div(column_tiles, column_warps));
    if (l.column_tiles > (wide ? 4 : 8)) return r;  // registers
    l.k_warps_log2 = log2_of(kConsumerWarps / t.row_tiles / column_warps);
    l.steps_per_tap = t.steps_per_tap();
    l.steps_inverse = ceil_div(65536, l.steps_per_tap);
    l.skip_channel = t.in_steps * 16;
    l.partial = static_cast<int64_t>(batch) * l.times_out * conv.channels_out;
    for (int s = 0; s < conv.num_segments; s++) {
      l.weights[s] = conv.segments[s].weights;
      l.tiles[s] = conv.segments[s].taps * l.steps_per_tap * t.row_tiles;
      l.first[s] = conv.segments[s].first;
      l.bias[s] = static_cast<int>(conv.bias[s]);
      l.message[s] = conv.upsample && s == 1 ? l.message[0] : message;
      if (l.message[s] == message) message += l.partial * kSlicesIn;
    }
    const ResidentLayer& previous = r.layers[r.count - 1];
    const bool by_message = conv.add && r.count > 1 && previous.num_segments == 2 && !previous.upsample;
    l.residual_message = by_message ? previous.message[1] : -1;
    l.other_bias = by_message ? previous.bias[1] : l.bias[0];
    l.norm = static_cast<int>(conv.norm), l.film = static_cast<int>(conv.film);
    l.add = conv.add, l.keep = conv.keep;
    l.scale = static_cast<int>(conv.scale);
    l.skip_out = conv.skip, l.skip_in = conv.skip_in;
    if (conv.skip >= 0) skip_bytes[conv.skip] = units_of(conv.channels_out, l.times_out) * 8;
    input_bytes = std::max(input_bytes, batch * (l.times_in + 2 * r.halo) * (l.steps_per_tap * 16 * element + 16));
    units = std::max(units, units_of(conv.channels_out, l.times_out));
    partial_bytes = std::max(partial_bytes,
                             l.num_segments * (1 << l.k_warps_log2) * batch * l.columns_per_sample * (t.rows + 4) * 4);
  }
  r.tail_message = message;
  int pairs = batch == 1 ? solo_pairs(units / threads) : 0;
  if (bulk) {
    if (pairs > 0) solo_layers(r, pairs, wide, bulk);
  } else {  // the columns of a narrow network may need the code of more pairs a thread than there are
    if (pairs == 3) pairs = 4;
    while (pairs > 0 && pairs <= 4 && !solo_layers(r, pairs, wide, bulk)) pairs *= 2;
  }
  if (bulk)
    partial_bytes = std::max(partial_bytes, 2 * kConsumerWarps * kSoloShareFloats * 4 * std::max(1, r.pairs));
  else
    partial_bytes = kConsumerWarps * r.share * 4;

  int at = 0;
  auto take = [&](int bytes) {
    const int begin = at;
    at += (bytes + 127) / 128 * 128;
    return begin;
  };
  const int width = c.down_dims[0] / kSlicesIn;
  r.input = take(input_bytes);
  r.input_low = wide ? take(input_bytes) : r.input;
  r.stash = take(units * 8);
  r.residual = take(units * 8);
  int skips[kMaxLevels];
  for (int i = 0; i < c.levels; i++) skips[i] = take(skip_bytes[i]);
  for (int i = 0; i <= r.count; i++) {
    ResidentLayer& l = r.layers[i];
    if (l.skip_out >= 0) l.skip_out = skips[l.skip_out];
    if (l.skip_in >= 0) l.skip_in = skips[l.skip_in];
  }
  r.sums = take(batch * kConsumerWarps * 8);
  r.partial = take(partial_bytes);
  r.head = take(c.kernel_size * c.action_dim * width * 4);
  r.head_residual = take(c.action_dim * width * 4);
  r.tail = take(c.action_dim * width * 4);
  r.sample = take(batch * horizon * c.action_dim * 4);
  r.descriptors = take((r.count + 1) * static_cast<int>(std::max(sizeof(ResidentLayer), sizeof(SoloLayer))));
  constexpr int kStatic = 4096;
  r.buffer = at;
  r.stages = std::min(kMaxBufferBytes, device.shared_bytes - kStatic - at) / r.stage_bytes;
  r.shared_bytes = at + r.stages * r.stage_bytes;
  if (bulk && r.stages < solo_stages(r.pairs)) r.pairs = 0, r.tail_message = message;
  if (r.pairs > 0) solo_layers(r, r.pairs, wide, bulk);  // with the places in shared memory
  keep_weights(r, plan);
  const int64_t tail = static_cast<int64_t>(batch) * horizon * c.action_dim;
  r.message_words = r.tail_message + slices_out * kSlicesIn * tail;
  // The general kernel knows no scales, no merged slices and no channels that are not counted.
  int rows = 1;
  for (int i = 1; i <= r.count; i++) rows = std::max(rows, 1 << r.layers[i].row_tiles_log2);
  const int least = std::max(bulk ? kMinBulkBuffer : kMinAsyncBuffer, kConsumerWarps * rows * r.tile_bytes);
  r.fits = r.stages * r.stage_bytes >= least && r.tile_bytes * kConsumerWarps <= r.stage_bytes &&
           (r.pairs > 0 || (bulk && plan.dtype != DType::kFloat8E4M3 && !c.widened()));
  return r;
}

bool records(const Plan& plan, int batch, int horizon, const Device& device) {
  const ResidentLayout layout = resident_layout(plan, batch, horizon, device);
  return layout.fits && layout.pairs > 0 && layout.pairs <= 2;
}

bool solo_fits(const Plan& plan, int horizon, const Device& device) {
  const ResidentLayout layout = resident_layout(plan, 1, horizon, device);
  return layout.fits && layout.pairs > 0 && layout.blocks <= device.multiprocessors;
}

bool resident_fits(const Plan& plan, int batch, int horizon, const Device& device) {
  const ResidentLayout layout = resident_layout(plan, batch, horizon, device);
  return layout.fits && layout.blocks <= device.multiprocessors;
}

}  // namespace dpa::kernels::unet1d
