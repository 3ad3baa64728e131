#include "kernels/plans/conv1d/plan.h"

#include <algorithm>
#include <limits>

namespace dpa::kernels::conv1d {
namespace {

// Blocks a tile: doubled while every block keeps `least` steps, and twice as many or more where the grid then fills
// over half of the device. Clusters of `crowd` blocks or more find no place for many more than four fifths of it:
// multiprocessors come in parts of 16 or 18. That is 8, or 4 where a block has a multiprocessor to itself.
int splits_for(int64_t tiles, int64_t steps, int least, int multiprocessors, int crowd) {
  int splits = 1;
  while (splits < kMaxSplits) {
    const int64_t blocks = tiles * splits * 2, left = steps / (splits * 2);
    const bool full = blocks * 2 > multiprocessors;
    if (blocks > multiprocessors || left < (full ? 3 * least : least) ||
        (splits * 2 >= crowd && blocks * 5 > multiprocessors * 4))
      break;
    splits *= 2;
  }
  return splits;
}

// Microseconds of a call whose blocks each have a multiprocessor: a fit to measured times (docs/training-log.md). Where
// nothing runs beside it, four and eight blocks cost what they do since they send each other sums
// (docs/sampler-log.md).
double call_us(int columns, int splits, int64_t steps, bool alone) {
  const auto each = static_cast<double>(ceil_div(steps, splits));
  if (columns == 64) return (splits == 1 ? 3.4 : splits == 2 ? 3.9 : alone ? 4.6 : 6.3) + 0.21 * each;
  const double four = alone ? 5.4 : 6.6, eight = alone ? 6.5 : 8.6;
  return (splits == 1 ? 4.3 : splits == 2 ? 4.9 : splits == 4 ? four : eight) + 0.28 * each;
}

// Tiles of 64 columns, `step` of them used, in the place of split tiles of 128, where they take less time with no more
// blocks, or in half of the device: a block more is a multiprocessor less for what runs beside this kernel.
void narrow(ConvPlan& plan, int64_t outputs, int step, int64_t steps, int multiprocessors, bool alone) {
  if (plan.tile_columns != 128 || plan.splits == 1 || outputs <= step) return;
  const int64_t row_tiles = plan.rows.count * plan.phases, column_tiles = ceil_div(outputs, step);
  const int64_t most = std::max<int64_t>(row_tiles * plan.column_tiles * plan.splits, multiprocessors / 2);
  double least = call_us(128, plan.splits, steps, alone);
  for (int splits = 1; splits <= kMaxSplits; splits *= 2) {
    const int64_t blocks = row_tiles * column_tiles * splits;
    const bool fits = blocks <= most && (splits < 4 || blocks * 5 <= multiprocessors * 4);
    if (!fits || steps < 2 * splits || (plan.together && splits > plan.chunks)) continue;
    const double us = call_us(64, splits, steps, alone);
    if (us >= least) continue;
    least = us;
    plan.tile_columns = 64, plan.column_step = step, plan.column_tiles = column_tiles, plan.splits = splits;
  }
}

// Split-K of tiles whose rows and columns are known. `times`: how often each box of x is multiplied.
void split(ConvPlan& plan, int multiprocessors, int times = 1) {
  const int terms = plan.phases == 1 ? plan.terms[0] : std::min(plan.terms[0], plan.terms[1]);
  plan.splits = splits_for(plan.rows.count * plan.phases * plan.column_tiles,
                           int64_t{terms} * plan.parts * plan.chunks * times, 2, multiprocessors, 4);
  while (plan.together && plan.splits > plan.chunks * times) plan.splits /= 2;
}

// Whether one box of x, `reach` times longer than a tile, can serve all terms.
bool shares_box(const RowTiles& rows, int reach) {
  return rows.per_sample == 1 && (rows.time + reach) * rows.samples <= 2 * kTileRows;
}

// `first`: how many of the contracted channels are of the first of two tensors, or all.
void finish(ConvPlan& plan, const Conv1d& conv, int64_t x_length, int64_t out_length, int64_t contracted, int64_t first,
            int64_t outputs, int multiprocessors, int step) {
  plan.rows = row_tiles(conv.batch, ceil_div(out_length, plan.phases), kTileRows);
  plan.parts = weight_parts(conv);
  const int64_t step_channels = chunk(conv);
  plan.first_chunks = static_cast<int>(ceil_div(first, step_channels));
  plan.chunks = plan.first_chunks + static_cast<int>(ceil_div(contracted - first, step_channels));
  const int64_t row_tiles = plan.rows.count * plan.phases;
  const int terms = plan.phases == 1 ? plan.terms[0] : std::min(plan.terms[0], plan.terms[1]);
  const int64_t steps = static_cast<int64_t>(terms) * plan.parts * plan.chunks * rounds(conv);
  // The wide tile reads less for each MMA, but has a longer epilogue: it is for long sums, and for a grid that
  // fills most of the device.
  const bool wide = !conv.halves && !conv.in_place && outputs % 256 == 0 && steps >= 64 &&
                    row_tiles * (outputs / 256) * 5 >= multiprocessors * 4;
  plan.tile_rows = kTileRows, plan.tile_columns = wide ? 256 : 128;
  plan.column_step = plan.tile_columns, plan.column_tiles = ceil_div(outputs, plan.tile_columns);
  // The swizzle follows addresses, so a term's rows may begin at any row of a box. Split-K is then over chunks.
  const int* const shift = plan.shift[0];
  plan.lowest = std::min(shift[0], shift[plan.terms[0] - 1]), plan.reach = plan.terms[0] - 1;
  plan.together = plan.phases == 1 && plan.stride == 1 && plan.reach > 0 && shares_box(plan.rows, plan.reach);
  // Where no tile is full, all have as many samples: two of eight, not one of ten and one of six.
  if (conv.alone && plan.together && plan.rows.time * plan.rows.samples != kTileRows)
    plan.rows.samples = static_cast<int>(ceil_div(conv.batch, plan.rows.count));
  split(plan, multiprocessors, rounds(conv));
  if (step > 0) narrow(plan, outputs, step, steps, multiprocessors, conv.alone);
  if (!plan.together) plan.lowest = plan.reach = 0;
  find_padding(plan, x_length);
}

// Passes of a warp over a group of any multiple of four channels, as many rows at a time as its lanes hold, four channels
// each; 0 where they are not 1, 2, 4 or 8.
int passes_over(int64_t length, int64_t group) {
  int64_t rows = 1;
  while (rows * 2 * group / 4 <= 32) rows *= 2;
  const int64_t passes = length / rows;
  const bool known = passes == 1 || passes == 2 || passes == 4 || passes == 8;
  return known && passes * rows == length ? static_cast<int>(passes) : 0;
}

}  // namespace

void find_padding(ConvPlan& plan, int64_t x_length) {
  for (int w = 0; w < 2; ++w) {
    int &first = plan.first_term[w], &end = plan.end_term[w];
    first = 0, end = plan.terms[0];
    if (!plan.together) continue;
    if (w * 64 >= plan.rows.time * plan.rows.samples) {  // none of its rows is used
      first = end;
      continue;
    }
    const int from = w * 64 / plan.rows.samples, to = (w * 64 + 63) / plan.rows.samples;
    const auto padding = [&](int term) {
      const int shift = plan.shift[0][term];
      return to + shift < 0 || from + shift >= x_length;
    };
    while (first < end && padding(first)) ++first;
    while (first < end && padding(end - 1)) --end;
  }
}

RowTiles row_tiles(int64_t batch, int64_t length, int limit) {
  RowTiles tiles{};
  if (length <= limit) {
    tiles.time = static_cast<int>(std::max<int64_t>(length, 1));
    tiles.samples = static_cast<int>(std::min<int64_t>(limit / tiles.time, std::max<int64_t>(batch, 1)));
    tiles.per_sample = 1;
    tiles.count = ceil_div(batch, tiles.samples);
  } else {
    tiles.time = limit;
    tiles.samples = 1;
    tiles.per_sample = static_cast<int>(ceil_div(length, limit));
    tiles.count = batch * tiles.per_sample;
  }
  return tiles;
}

bool built_with_kernels() {
#ifdef DPA_CUDA_KERNELS
  return true;
#else
  return false;
#endif
}

bool wgmma_takes_taps(const Conv1d& c) { return c.taps == 1 || (c.taps >= 3 && c.taps <= 5) || c.taps == 7; }

bool serves(const Conv1d& c) {
  const auto type = c.dtype == DType::kFloat16 || c.dtype == DType::kBFloat16 || c.dtype == DType::kFloat32;
  const bool taps = c.taps >= 1 && c.taps <= kMaxTaps;
  const bool stride = c.stride == 1 || c.stride == 2;
  // Every phase of dgrad needs a tap, and every row of x a place.
  const bool reach = c.taps >= c.stride && c.padding >= 0 && c.padding < c.taps;
  const bool some = c.batch > 0 && c.y_length > 0 && c.x_length > 0 && c.y_channels > 0 && c.x_channels > 0;
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max() / 4;
  const bool sizes = c.batch < kLimit && c.y_length < kLimit && c.x_length < kLimit && c.y_channels < kLimit &&
                     c.x_channels < kLimit &&
                     c.batch * ceil_div(std::max(c.y_length, c.x_length), kTileRows) * 2 < kLimit &&
                     ceil_div(std::max(c.y_channels, c.x_channels), 32) < 65536;
  return type && taps && stride && reach && some && sizes;
}

bool can_read_in_place(const Conv1d& c) {
  const bool format = c.dtype == DType::kFloat32 && !c.halves && c.x_channels % 4 == 0 && weight_parts(c) == 1;
  const bool taps = c.taps % 2 == 1 && c.taps > 1 && c.taps <= kInPlaceTaps;
  if (!format || !taps || c.stride != 1 || c.x_length != c.y_length) return false;
  return shares_box(row_tiles(c.batch, c.y_length, kTileRows), c.taps - 1);
}

bool reads_in_place(const Conv1d& c) {
  const int64_t weights = c.y_channels * c.x_channels * c.taps, rows = c.batch * c.y_length;
  // Measured in networks (docs/training-log.md).
  constexpr int64_t kMany = 12'000'000, kSome = 1 << 20;
  return rows <= (weights >= kMany ? 1024 : weights >= kSome ? 512 : 0) && can_read_in_place(c);
}

// `step`: columns that a tile of 64 may use, 0 where there may be none.
ConvPlan plan_fprop_of(const Conv1d& conv, int multiprocessors, int step) {
  ConvPlan plan{};
  plan.phases = 1;
  plan.stride = conv.stride;
  plan.terms[0] = conv.taps;
  for (int k = 0; k < conv.taps; ++k) plan.tap[0][k] = k, plan.shift[0][k] = k - conv.padding;
  const int64_t first = conv.first_channels > 0 ? conv.first_channels : conv.x_channels;
  finish(plan, conv, conv.x_length, conv.y_length, conv.x_channels, first, conv.y_channels, multiprocessors, step);
  return plan;
}

ConvPlan plan_fprop(const Conv1d& conv, int multiprocessors) { return plan_fprop_of(conv, multiprocessors, 64); }

ConvPlan plan_dgrad(const Conv1d& conv, int multiprocessors) {
  ConvPlan plan{};
  plan.phases = conv.stride;
  plan.stride = 1;
  for (int p = 0; p < plan.phases; ++p) {
    for (int k = 0; k < conv.taps; ++k) {
      const int distance = p + conv.padding - k;
      if (distance % conv.stride != 0) continue;
      const int i = plan.terms[p]++;
      plan.tap[p][i] = k, plan.shift[p][i] = distance / conv.stride;
    }
  }
  finish(plan, conv, conv.y_length, conv.x_length, conv.y_channels, conv.y_channels, conv.x_channels, multiprocessors,
         64);
  return plan;
}

bool normalises(const Conv1d& conv, const ConvPlan& plan, int64_t group) {
  const auto power_of_two = [](int64_t n) { return n > 0 && (n & (n - 1)) == 0; };
  const int64_t length = conv.y_length, elements = length * group;
  const bool samples = plan.rows.per_sample == 1 && length * plan.rows.samples == plan.tile_rows;
  // A group is one to eight passes of a warp, four channels a lane.
  const bool warp = power_of_two(length) && power_of_two(group) && group >= 4 && group <= 128 && elements >= 128 &&
                    elements <= 8 * 128;
  return conv.stride == 1 && samples && warp && group <= plan.tile_columns && plan.rows.samples % plan.splits == 0 &&
         conv.y_channels % group == 0;
}

ConvPlan plan_normalised(const Conv1d& conv, int64_t group, int multiprocessors) {
  ConvPlan plain = plan_fprop_of(conv, multiprocessors, group <= 64 ? static_cast<int>(64 / group * group) : 0);
  if (plain.tile_columns == 64) {
    while (conv.alone && plain.rows.samples % plain.splits != 0) plain.splits /= 2;  // whole samples of a block
    const bool whole = conv.stride == 1 && conv.y_length * plain.rows.samples == kTileRows && group % 4 == 0 &&
                       conv.y_channels % group == 0 && plain.rows.samples % plain.splits == 0;
    plain.passes = whole ? passes_over(conv.y_length, group) : 0;
    if (plain.passes > 0) return plain;
    plain = plan_fprop_of(conv, multiprocessors, 0);
  }
  if (normalises(conv, plain, group)) plain.passes = static_cast<int>(conv.y_length * group / 128);
  if (plain.passes > 0 || plain.tile_columns != 128) return plain;
  const bool fills = conv.y_length * plain.rows.samples == kTileRows;
  if (conv.stride == 1 && fills && group % 4 == 0 && group <= 128 && conv.y_channels % group == 0) {
    ConvPlan narrow = plain;
    narrow.passes = passes_over(conv.y_length, group);
    narrow.column_step = static_cast<int>(128 / group * group);
    narrow.column_tiles = ceil_div(conv.y_channels, narrow.column_step);
    split(narrow, multiprocessors);
    // A third more tiles cost less than a kernel of its own.
    const bool few = narrow.column_tiles * 3 <= plain.column_tiles * 4;
    if (few && narrow.passes > 0 && narrow.rows.samples % narrow.splits == 0) return narrow;
  }
  const bool whole = conv.stride == 1 && plain.rows.per_sample == 1 && conv.y_channels % group == 0;
  // Four columns a lane; a table of moments of 16 groups; of a larger group two tiles are parts.
  if (!whole || group % 4 != 0 || group < 8 || (group > 128 && group != 256)) return plain;
  ConvPlan plan = plain;
  plan.exchange = group > 128 ? 2 : 1;
  plan.tile_rows = plan.rows.time * plan.rows.samples;
  const int64_t groups = 128 / std::min<int64_t>(group, 128), tiles = ceil_div(conv.y_channels, groups * group);
  if (plan.rows.samples * groups > kMaxMoments) return plain;
  if (plan.exchange == 1) {  // tiles of about the same number of groups, and no more of them than without
    if (tiles > plain.column_tiles) return plain;
    plan.column_step = static_cast<int>(ceil_div(conv.y_channels / group, tiles) * group);
  }
  const int64_t blocks = plan.rows.count * plan.column_tiles;
  // With little to contract, blocks that contract nothing still finish their rows.
  while (conv.alone && plan.splits < 4 && blocks * plan.splits * 2 * 5 <= multiprocessors * 4) plan.splits *= 2;
  while (plan.splits > 1 &&
         (plan.cluster() > kMaxSplits || (plan.cluster() >= 4 && blocks * plan.splits * 5 > multiprocessors * 4)))
    plan.splits /= 2;
  // A warp has four rows in registers (epilogue_exchange.cuh). More of them would take longer than a kernel of its own.
  return plan.splits < 4 ? plain : plan;
}

InPlaceStage in_place_stage(const ConvPlan& plan, int taps, bool dgrad) {
  constexpr uint32_t kWord = 4;
  InPlaceStage stage{};
  stage.transposed = dgrad, stage.taps = taps;
  stage.boxes = dgrad ? plan.tile_columns / kInPlaceOutputs : 1;
  stage.rows = dgrad ? kInPlaceChannels : plan.column_step;
  stage.width = dgrad ? kInPlaceOutputs * taps + 8 : kInPlaceChannels * taps + 4;
  const uint32_t row = stage.width * kWord, column = taps * kWord;
  stage.box_bytes = stage.rows * row, stage.bytes = dgrad ? stage.boxes * stage.box_bytes : plan.tile_columns * row;
  stage.of_output = dgrad ? column : row, stage.of_channel = dgrad ? row : column;
  stage.of_outputs = dgrad ? stage.box_bytes : kInPlaceOutputs * row;
  return stage;
}

WgradPlan plan_wgrad(const Conv1d& conv, int multiprocessors) {
  WgradPlan plan{};
  plan.rows = row_tiles(conv.batch, conv.y_length, kChunk);
  if (conv.dtype == DType::kFloat32) {
    const int64_t per_sample = ceil_div(conv.y_length, kTf32Times);
    plan.rows = {kTf32Times, kTf32Samples, static_cast<int>(per_sample),
                 ceil_div(conv.batch, kTf32Samples) * per_sample};
  }
  plan.x_channels = conv.taps == 1 ? 128 : conv.taps == 3 ? 64 : 32;
  plan.x_tiles = ceil_div(conv.x_channels, plan.x_channels);
  // The high tile reads less for each MMA, but only a grid that fills most of the device is worth it; with three
  // taps and with seven it does not fit.
  const int64_t high_tiles = ceil_div(conv.y_channels, 2 * kTileRows) * plan.x_tiles;
  // Two blocks of the low tile of one tap share a multiprocessor: with few steps their epilogues count.
  const bool short_sums = conv.taps == 1 && conv.dtype != DType::kFloat32 && plan.rows.count <= 4;
  plan.height = conv.taps != 3 && conv.taps != 7 && !short_sums && high_tiles * 5 >= multiprocessors * 4 ? 2 : 1;
  plan.y_tiles = ceil_div(conv.y_channels, plan.height * kTileRows);
  plan.splits = splits_for(plan.y_tiles * plan.x_tiles, plan.rows.count, 4, multiprocessors, 8);
  return plan;
}

bool streams(const Conv1d& conv, int multiprocessors) {
  const bool sizes = conv.dtype != DType::kFloat32 && (conv.taps == 5 || conv.taps == 7) && conv.stride == 1 &&
                     conv.x_channels % 4 == 0;
  if (!sizes) return false;
  const WgradPlan plan = plan_wgrad(conv, multiprocessors);
  constexpr int64_t kMostSteps = 32;  // beyond, the high tile's reads count, and its epilogue does not
  return plan.splits == 1 && plan.rows.samples <= kStreamSamples && plan.rows.count <= kMostSteps;
}

StreamPlan plan_stream(const Conv1d& conv, int multiprocessors) {
  StreamPlan plan{plan_wgrad(conv, multiprocessors), 0};
  plan.tiles.height = 1, plan.tiles.y_tiles = ceil_div(conv.y_channels, kTileRows);
  const int64_t tiles = plan.tiles.y_tiles * plan.tiles.x_tiles;
  // Half of the device is left to the data gradient and to normalisations, unless the sums are long.
  constexpr int64_t kFewSteps = 40;
  const int64_t half = std::max(multiprocessors / 2, 1);
  const bool few = ceil_div(tiles, half) * plan.tiles.rows.count <= kFewSteps;
  const int64_t rounds = ceil_div(tiles, few ? half : multiprocessors);
  plan.blocks = ceil_div(tiles, rounds);
  return plan;
}

}  // namespace dpa::kernels::conv1d
