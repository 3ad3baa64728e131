// Chooses how the resident kernel divides its work, and whether it can.
#include "kernels/plans/unet1d/resident_layout.h"

#include <algorithm>

namespace dpa::kernels::unet1d {
namespace {

constexpr int kElement = 2, kThreads = kConsumerWarps * 32;  // kElement: bytes of an activation, or of its high half

// A layout in the making.
struct Maker {
  const Plan& plan;
  const int horizon;
  const bool bulk, wide;
  ResidentLayout& r;

  int times(int level) const { return horizon >> level; }
  int pairs_of(int channels, int times) const { return times * channels / kSlicesIn / 2; }

  // What becomes of an output of `channels` in `groups`, of which GroupNorm counts `counted`, without its messages.
  bool describe_output(SoloLayer& s, int channels, int groups, int counted, int times) const {
    const int width = channels / groups, slice = channels / kSlicesIn;
    if (groups > kMostGroups * kSlicesIn || groups % kSlicesIn || !power_of_two(width) || width < 2 ||
        !power_of_two(slice))
      return false;
    s.channels = channels, s.half_log2 = log2_of(slice / 2), s.pairs = pairs_of(channels, times);
    const int own = counted / groups;
    s.counted = ceil_div(own, 2), s.flags = log2_of(width / 2) << kSoloGroupShift | (own % 2 ? kSoloOdd : 0);
    r.parts |= groups > kSlicesIn || (wide && own % 2);
    s.inverse_count = 1.0f / static_cast<float>(times * own);
    s.residual_message = s.skip_out = s.skip_in = -1;
    return true;
  }

  // Descriptors of the output and the GEMM's sizes; what depends on the pairs a thread comes later.
  bool describe(int i, const Conv& conv) {
    Tiling t = tiling(plan, conv);
    t.rows <<= r.merged_log2, t.row_tiles <<= r.merged_log2;
    if (t.rows % 16 || !power_of_two(t.row_tiles) || conv.channels_out / kSlicesIn % 16) return false;
    if (t.row_tiles > (bulk ? kConsumerWarps : 2 * kConsumerWarps)) return false;
    SoloLayer& s = r.solo[i];
    if (!describe_output(s, conv.channels_out, conv.norm >= 0 ? conv.groups : kSlicesIn, conv.counted,
                         times(conv.level_out)))
      return false;
    s.bias = s.other_bias = static_cast<int>(conv.bias[0]);
    s.norm = static_cast<int>(conv.norm), s.film = static_cast<int>(conv.film), s.scale = static_cast<int>(conv.scale);
    s.flags |= (conv.add ? kSoloAdd : 0) | (conv.keep ? kSoloKeep : 0);
    s.skip_out = conv.skip, s.skip_in = conv.skip_in;
    s.columns = times(conv.upsample ? conv.level_in : conv.level_out);
    s.steps_per_tap = t.steps_per_tap(), s.steps_inverse = ceil_div(65536, s.steps_per_tap);
    s.skip_bytes = t.in_steps * 16 * kElement;
    s.pitch = (s.steps_per_tap * 16 + 8) * kElement, s.tap_bytes = s.pitch - s.steps_per_tap * 16 * kElement;
    s.stride = conv.stride * s.pitch;
    const int least = ceil_div(s.columns, 8),
              column_tiles = least < 3 || (least == 3 && t.row_tiles == 2) ? least : least + least % 2;
    s.shape = t.row_tiles << 4 | column_tiles;
    StreamedWeights& w = r.weights[i];
    w.num_segments = conv.num_segments;
    for (int k = 0; k < conv.num_segments; k++) {
      w.from[k] = conv.segments[k].weights;
      s.steps[k] = conv.segments[k].taps * s.steps_per_tap, w.tiles[k] = s.steps[k] * t.row_tiles;
      s.first[k] = conv.segments[k].first * s.pitch;
    }
    return true;
  }

  // Whether the kernel for so many pairs a thread has code for a GEMM, and room for its sums and messages.
  bool has_code(const SoloLayer& s, int pairs) const {
    const int row_tiles = s.shape >> 4, words = wide ? 1 : 2, rounds = ceil_div(pairs, words);  // sums a message word
    if (!solo_has_shape(bulk, wide, pairs, row_tiles, s.shape & 15)) return false;
    return !bulk || (s.columns * (16 * row_tiles + 4) <= kSoloShareFloats * pairs &&
                     s.columns * row_tiles * 16 / words <= kThreads * rounds);
  }
  int choose_pairs(int most) const {
    auto all = [&](int pairs) {
      return std::all_of(r.solo + 1, r.solo + r.count + 1, [&](const SoloLayer& s) { return has_code(s, pairs); });
    };
    // The columns of a narrow network may need the code of more pairs a thread than there are.
    for (int pairs = most; pairs <= 4; pairs++)
      if (all(pairs)) return pairs;
    return 0;
  }

  // Where partial sums go. A residual's are read a layer later, an upsampling GEMM's two segments make one output.
  void place_messages() {
    const int pack = wide ? 1 : 2, block = kSlicesIn * static_cast<int>(solo_message_stride(r.pairs, wide));
    int message = 0;
    for (int i = 1; i <= r.count; i++) {
      const Conv& conv = plan.convs[i - 1];
      SoloLayer& s = r.solo[i];
      s.message = message, message += block;
      s.out[0] = s.out[1] = s.message;
      s.out_stride = (conv.upsample ? 2 : 1) * conv.channels_out / pack;
      if (conv.upsample) s.out[1] += conv.channels_out / pack;
      if (conv.num_segments == 2 && !conv.upsample) s.out[1] = message, message += block;
      if (i == 1 || !conv.add) continue;
      const Conv& before = plan.convs[i - 2];
      if (before.num_segments != 2 || before.upsample) continue;
      s.residual_message = r.solo[i - 1].out[1], s.other_bias = static_cast<int>(before.bias[1]);
    }
    r.tail_message = message;
    r.message_words = message + int64_t{r.blocks} * horizon * plan.config.action_dim;
  }

  void place_shared(const Device& device) {
    const Config& c = plan.config;
    Places<int> take = {128};
    int input_bytes = 0, units = 0, skip_bytes[kMaxLevels] = {}, skips[kMaxLevels];
    auto units_of = [](int pairs) { return ceil_div(pairs, kThreads) * kThreads; };
    for (int i = 0; i <= r.count; i++) {
      const SoloLayer& s = r.solo[i];
      units = std::max(units, units_of(s.pairs));
      if (s.skip_out >= 0) skip_bytes[s.skip_out] = units_of(s.pairs) * 8;
      if (i > 0) input_bytes = std::max(input_bytes, (times(plan.convs[i - 1].level_in) + 2 * r.halo) * s.pitch);
      r.share = bulk ? kSoloShareFloats * r.pairs : std::max(r.share, s.columns * (16 * (s.shape >> 4) + 4));
    }
    const int width = c.down_dims[0] / kSlicesIn, taps = c.kernel_size * c.action_dim,
              around = (c.kernel_size / 2 * c.action_dim * 4 + 15) / 16 * 16;
    r.input = take(input_bytes);
    r.input_low = wide ? take(input_bytes) : r.input;
    r.stash = take(units * 8);
    r.residual = take(units * 8);
    for (int i = 0; i < c.levels; i++) skips[i] = take(skip_bytes[i]);
    r.sums = take((r.parts ? kMostGroups : 1) * kConsumerWarps * 16);
    r.partial = take((bulk ? 2 : 1) * kConsumerWarps * r.share * 4);
    r.head = take(taps * width * 4);
    r.head_residual = take(c.action_dim * width * 4);
    r.tail = take(c.action_dim * (width + 1) * 4);
    // The first convolution reads rows of all of a thread's pairs, also where some lie behind the times. On Hopper the
    // circular buffer follows.
    const int rows = bulk ? horizon : std::max(horizon, r.pairs * (kThreads >> r.solo[0].half_log2));
    r.sample = take(rows * c.action_dim * 4 + 2 * around) + around;
    r.descriptors = take((r.count + 1) * static_cast<int>(sizeof(SoloLayer)));
    for (int i = 0; i <= r.count; i++) {
      SoloLayer& s = r.solo[i];
      if (s.skip_out >= 0) s.skip_out = skips[s.skip_out];
      if (s.skip_in >= 0) s.skip_in = skips[s.skip_in];
      s.input = r.input + r.halo * s.pitch;
      s.last_row = s.input + (i ? times(plan.convs[i - 1].level_in) : 0) * s.pitch;
    }
    constexpr int kStatic = 4096;
    r.buffer = take.at;
    const int left = device.shared_bytes - kStatic - r.buffer;
    r.stages = bulk ? std::min(kMaxStages, left / kStageBytes) : 0;
    r.shared_bytes = r.buffer + r.stages * kStageBytes;
    r.fits = left >= (bulk ? solo_stages(r.pairs) * kStageBytes : 0);
  }
};

// Weights of which a step is hardly longer than reading them: all that keeps memory busy helps.
constexpr int64_t kMemoryBound = 256 << 20;

// Stages under way at a time. What polls read queues behind them, so as few as keep memory busy: of 16 KB two, and one
// where weights are few beside a step.
int stages_at_once(const ResidentLayout& r, const Plan& plan) {
  if (plan.tile_bytes >= kMemoryBound) return r.stages;
  if (plan.dtype == DType::kFloat32) return 2;
  return r.pairs == 3 || (r.pairs == 1 && plan.dtype == DType::kFloat8E4M3) ? 1 : 2;
}

// Weights that are asked to stay in L2 from step to step.
constexpr int64_t kKept = 14 << 20;

// On Hopper, where memory's bandwidth decides, which it does in the wide layers, a part of every wide layer, but for those
// that the circular buffers hold when a step comes to them. Otherwise the first ones. A larger network gains nothing by it.
void keep_weights(ResidentLayout& r, const Plan& plan) {
  if (plan.tile_bytes >= kMemoryBound) return;
  r.kept_end = 16 << 20;
  if (plan.dtype == DType::kFloat8E4M3) return;
  auto bytes = [&](const StreamedWeights& w) {
    return int64_t{w.tiles[0] + (w.num_segments == 2 ? w.tiles[1] : 0)} * r.tile_bytes * r.blocks;
  };
  int64_t widest = 0, buffered = int64_t{r.stages} * kStageBytes * r.blocks;
  for (int i = 1; i <= r.count; i++) widest = std::max(widest, bytes(r.weights[i]));
  int64_t begin = -1, end = 0;
  for (int i = 1; i <= r.count; i++) {
    const StreamedWeights& w = r.weights[i];
    if (2 * bytes(w) < widest) continue;
    if (buffered <= 0) {
      if (begin < 0) begin = w.from[0];
      end = w.from[0] + bytes(w);
    }
    buffered -= bytes(w);
  }
  if (end - begin < kKept) return;
  r.kept_begin = begin, r.kept_end = end, r.kept_every = static_cast<int>((end - begin + kKept - 1) / kKept);
}

}  // namespace

ResidentLayout resident_layout(const Plan& plan, int horizon, const Device& device) {
  ResidentLayout r;
  const Config& c = plan.config;
  const bool bulk = device.hopper;
  constexpr int kMostHalo = 4;
  if (plan.slices_in != kSlicesIn) return r;
  int slices_out = plan.slices_out;
  while (!bulk && slices_out > 1 && slices_out * kSlicesIn > device.multiprocessors) slices_out /= 2, r.merged_log2++;
  if (slices_out << r.merged_log2 != plan.slices_out) return r;
  r.blocks = slices_out * kSlicesIn;
  r.threads = (kConsumerWarps + (bulk ? kProducerWarps : 0)) * 32;
  r.tile_bytes = 256 * element_bytes(plan.dtype);
  r.halo = std::max(c.kernel_size / 2, 1);
  r.count = static_cast<int>(plan.convs.size());
  Maker make = {plan, horizon, bulk, plan.dtype == DType::kFloat32, r};
  SoloLayer& head = r.solo[0];
  if (r.halo > kMostHalo || !make.describe_output(head, c.down_dims[0], c.num_groups, c.width(0).own, horizon))
    return r;
  head.bias = static_cast<int>(plan.head.bias), head.other_bias = static_cast<int>(plan.head.residual_bias);
  head.norm = static_cast<int>(plan.head.norm), head.film = static_cast<int>(plan.head.film);
  int most = head.pairs;
  for (int i = 1; i <= r.count; i++) {
    if (!make.describe(i, plan.convs[i - 1])) return r;
    most = std::max(most, r.solo[i].pairs);
  }
  r.pairs = make.choose_pairs(ceil_div(most, kThreads));
  if (r.pairs == 0) return r;
  make.place_shared(device);
  make.place_messages();
  if (bulk) {
    r.at_once = stages_at_once(r, plan);
    keep_weights(r, plan);
  } else {
    r.kept_part = std::min(1.0f, static_cast<float>(kKept) / static_cast<float>(plan.tile_bytes));
  }
  return r;
}

bool resident_fits(const Plan& plan, int horizon, const Device& device) {
  const ResidentLayout layout = resident_layout(plan, horizon, device);
  return layout.fits && layout.blocks <= device.multiprocessors;
}

}  // namespace dpa::kernels::unet1d
