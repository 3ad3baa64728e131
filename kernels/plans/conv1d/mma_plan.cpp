#include "kernels/plans/conv1d/mma_plan.h"

#include <algorithm>
#include <limits>

namespace dpa::kernels::conv1d {
namespace {

// The terms of fprop, or of dgrad's phases.
ConvPlan terms_of(const Conv1d& conv, bool dgrad) {
  ConvPlan plan = dgrad ? plan_dgrad(conv, 1) : plan_fprop(conv, 1);
  plan.splits = 1;
  int low = std::numeric_limits<int>::max(), high = std::numeric_limits<int>::min();
  for (int p = 0; p < plan.phases; ++p)
    for (int i = 0; i < plan.terms[p]; ++i)
      low = std::min(low, plan.shift[p][i]), high = std::max(high, plan.shift[p][i]);
  plan.lowest = low, plan.reach = high - low;
  return plan;
}

struct Sizes {
  int64_t in, out, contracted, outputs;
};

// A plan with tiles of rows x columns.
MmaPlan with_tile(const Conv1d& conv, ConvPlan plan, const Sizes& sizes, int rows, int columns) {
  MmaPlan result{};
  const int64_t length = ceil_div(sizes.out, plan.phases);
  plan.rows = row_tiles(conv.batch, length, rows);
  const auto box_times = [&] {
    return static_cast<int>(std::min<int64_t>(sizes.in, int64_t{plan.rows.time - 1} * plan.stride + 1 + plan.reach));
  };
  result.box_times = box_times();
  if (int64_t{result.box_times} * plan.rows.samples > kMaxBoxRows) {
    if (plan.rows.samples > 1) {
      plan.rows.samples = std::max(1, kMaxBoxRows / result.box_times);
      plan.rows.count = ceil_div(conv.batch, plan.rows.samples);
    } else {
      plan.rows.time = (kMaxBoxRows - 1 - plan.reach) / plan.stride + 1;
      plan.rows.per_sample = static_cast<int>(ceil_div(length, plan.rows.time));
      plan.rows.count = conv.batch * plan.rows.per_sample;
      result.box_times = box_times();
    }
  }
  if (int64_t{result.box_times} * plan.rows.samples > kMaxBoxRows) return {};
  plan.tile_rows = rows, plan.tile_columns = plan.column_step = columns;
  plan.column_tiles = ceil_div(sizes.outputs, columns);
  plan.chunks = static_cast<int>(ceil_div(sizes.contracted, chunk(conv)));
  plan.together = plan.phases == 1 && plan.stride == 1 && plan.rows.per_sample == 1;
  find_padding(plan, sizes.in);
  if (!plan.together) plan.end_term[0] = plan.end_term[1] = kMaxTaps;
  const int stages = mma_stages(rows, columns);
  const int terms = plan.parts * (plan.phases == 1 ? plan.terms[0] : std::min(plan.terms[0], plan.terms[1]));
  result.conv = plan, result.boxes = 1 + static_cast<int>(ceil_div(stages - 1, terms));
  result.splits = 1, result.split_chunks = rounds(conv) * plan.chunks;
  result.box_bytes = result.box_times * plan.rows.samples * 128;
  result.weights_at = result.boxes * result.box_bytes;
  if (mma_bytes(result) > kMmaMemory) result.boxes = 0;
  return result;
}

// The multiprocessors' work, in output elements: the small tiles read more for each MMA.
double cost(const MmaPlan& plan, int multiprocessors) {
  const ConvPlan& conv = plan.conv;
  const int64_t area = conv.tile_rows * conv.tile_columns;
  const double rate = area == 128 * 128 ? 1 : area == 64 * 64 ? 0.6 : 0.85;
  return static_cast<double>(ceil_div(plan.tiles(), multiprocessors) * area) / rate;
}

// Where tiles leave half of the multiprocessors or more, blocks contract a part of K each, as long as it is several steps.
void split(MmaPlan& plan, int multiprocessors) {
  constexpr int kLeastSteps = 8;
  const ConvPlan& conv = plan.conv;
  const int chunks = plan.split_chunks;  // of one block
  const int terms = conv.parts * (conv.phases == 1 ? conv.terms[0] : std::min(conv.terms[0], conv.terms[1]));
  int splits = 1;
  while (splits < kMaxMmaSplits && plan.tiles() * splits * 2 <= multiprocessors &&
         chunks / (splits * 2) * terms >= kLeastSteps)
    splits *= 2;
  plan.split_chunks = static_cast<int>(ceil_div(chunks, splits));
  plan.splits = static_cast<int>(ceil_div(chunks, plan.split_chunks));
}

MmaPlan cheapest(const Conv1d& conv, bool dgrad, int multiprocessors, int64_t group) {
  const Sizes sizes = dgrad ? Sizes{conv.y_length, conv.x_length, conv.y_channels, conv.x_channels}
                            : Sizes{conv.x_length, conv.y_length, conv.x_channels, conv.y_channels};
  const ConvPlan terms = terms_of(conv, dgrad);
  MmaPlan best{};
  for (const int rows : {128, 64})
    for (const int columns : {128, 64}) {
      const auto plan = with_tile(conv, terms, sizes, rows, columns);
      // A stride of two has one kernel, and float32 in full.
      const bool takes = (terms.stride == 1 && !in_full(conv)) || rows * columns == 64 * 64;
      if (!takes || !plan.fits() || group > columns) continue;
      if (!best.fits() || cost(plan, multiprocessors) < cost(best, multiprocessors)) best = plan;
    }
  if (best.fits()) split(best, multiprocessors);
  return best;
}

}  // namespace

int mma_bytes(const MmaPlan& plan) {
  const ConvPlan& conv = plan.conv;
  const int stages = plan.weights_at + mma_stages(conv.tile_rows, conv.tile_columns) * conv.tile_columns * 128;
  return 128 + std::max(stages, conv.tile_rows * (conv.tile_columns + 8) * 4);
}

MmaPlan plan_mma_fprop(const Conv1d& conv, int multiprocessors, int64_t group) {
  return cheapest(conv, false, multiprocessors, group);
}
MmaPlan plan_mma_dgrad(const Conv1d& conv, int multiprocessors) { return cheapest(conv, true, multiprocessors, 0); }

MmaWgradPlan plan_mma_wgrad(const Conv1d& conv, int multiprocessors) {
  MmaWgradPlan plan{};
  const int64_t rows = conv.batch * conv.y_length, weights = conv.y_channels * conv.x_channels * conv.taps;
  const int size = conv.dtype == DType::kFloat32 ? 4 : 2;
  plan.slots = conv.taps <= 2 ? 4 : conv.taps == 3 ? 6 : conv.taps;
  plan.step_rows = wgrad_rows(plan.slots, size);
  // Where a step crosses from sample to sample, x may have rows that no row of y reads.
  const int64_t unread = std::max<int64_t>(0, conv.x_length - conv.y_length * conv.stride);
  const int64_t crossings = (plan.step_rows + conv.y_length - 2) / conv.y_length;
  const int64_t box = int64_t{plan.step_rows - 1} * conv.stride + conv.taps + crossings * unread;
  plan.x_channels = 32 * (plan.slots / conv.taps), plan.x_pitch = wgrad_pitch(plan.x_channels, size);
  while (16 << plan.x_shift < plan.x_channels * size) ++plan.x_shift;
  plan.steps = ceil_div(rows, plan.step_rows);
  plan.step_times = static_cast<int>(plan.step_rows % conv.y_length);
  plan.step_x = static_cast<int>(plan.step_rows / conv.y_length * conv.x_length + plan.step_times * conv.stride);
  plan.y_tiles = ceil_div(conv.y_channels, kWgradYChannels);
  plan.x_tiles = ceil_div(conv.x_channels, plan.x_channels);
  // In full a tile has three times the MMAs.
  const int most = in_full(conv) ? kMaxMmaSplits * 2 : kMaxMmaSplits, bytes = in_full(conv) ? 256 : 1024;
  plan.splits = 1;
  while (plan.splits < most && plan.y_tiles * plan.x_tiles * plan.splits * 8 <= int64_t{multiprocessors} * 5 &&
         plan.steps * plan.step_rows * size >= int64_t{plan.splits} * bytes)
    plan.splits *= 2;
  plan.box_rows = static_cast<int>(std::min<int64_t>(box, kMaxBoxRows));
  constexpr int64_t kRows = std::numeric_limits<int32_t>::max() - 64;
  const bool counts = rows < kRows && conv.batch * conv.x_length < kRows && weights < kRows;
  if (!counts || box > kMaxBoxRows || mma_wgrad_bytes(conv, plan) > kMmaMemory) plan.slots = 0;
  return plan;
}

int mma_wgrad_bytes(const Conv1d& conv, const MmaWgradPlan& plan) {
  const int size = conv.dtype == DType::kFloat32 ? 4 : 2;
  const int stage = plan.step_rows * (wgrad_pitch(kWgradYChannels, size) + 8) + plan.box_rows * plan.x_pitch;
  const int tile = kWgradYChannels / 2 * (plan.x_channels * conv.taps + 8) * 4;
  return (plan.x_pitch + 127) / 128 * 128 + std::max(wgrad_stages(plan.slots) * stage, tile);
}

bool mma_serves(const Conv1d& conv) {
  return serves(conv) && plan_mma_fprop(conv, 100).fits() && plan_mma_dgrad(conv, 100).fits() &&
         plan_mma_wgrad(conv, 100).fits();
}

}  // namespace dpa::kernels::conv1d
