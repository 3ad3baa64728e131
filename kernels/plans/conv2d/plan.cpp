#include "kernels/plans/conv2d/plan.h"

#include <algorithm>

namespace dpa::kernels::conv2d {
namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

Shape shape_of(DType dtype, int batch, int height, int width, int channels, int out_channels, int kernel, int stride,
               int padding, int groups) {
  const auto out = [&](int n) { return (n + 2 * padding - kernel) / stride + 1; };
  return {dtype,        batch,  height, width,  channels, out(height), out(width),
          out_channels, kernel, kernel, stride, padding,  padding,     groups};
}

Shape shape_of_cells(DType dtype, int batch, int height, int width, int out_channels, int groups) {
  const int h = (height + 1) / 2, w = (width + 1) / 2;
  return {dtype, batch, h, w, 12, h, w, out_channels, 4, 4, 1, 2, 2, groups};
}

int chunks_of(const Shape& s) {
  return ceil_div(s.kernel_height * s.kernel_width * pieces_of(s.dtype, s.channels), kChunkPieces);
}

bool serves(const Tiling& t, const Shape& s) {
  if (t.taps == 1) return true;
  const int pieces = pieces_of(s.dtype, s.channels);
  return s.stride == 1 && s.kernel_width == t.taps && s.out_height == s.height && s.out_width == s.width &&
         (t.pixel == kChunkPieces ? pieces % kChunkPieces == 0 : pieces == t.pixel);
}

int stages_of(const Tiling& t, const Shape& s) { return chunks_of(s) / (t.taps == 1 ? 1 : t.chunks()); }

int resident_blocks(int tiling, const Device& device) {
  constexpr int kReserved = 1 << 10;  // of each block, by the system
  const int by_memory = device.shared / (shared_bytes(kTilings[tiling]) + kReserved);
  return device.multiprocessors * std::min({by_memory, device.blocks_per_processor, kTilings[tiling].blocks()});
}

bool make_plan(const Shape& s, int tiling, int splits, ConvPlan& plan) {
  const Tiling& t = kTilings[tiling];
  const int pixels = s.out_height * s.out_width;
  plan = {};
  plan.tiling = tiling, plan.splits = splits;
  plan.chunks = chunks_of(s);
  if (!serves(t, s)) return false;
  plan.stages = stages_of(t, s);
  plan.column_tiles = ceil_div(s.out_channels, t.columns());
  if (splits > kMaxSplits || splits > plan.stages) return false;
  plan.sample_rows = s.groups ? pixels : s.batch * pixels;
  const int samples = s.groups ? s.batch : 1;
  plan.samples = plan.sample_rows <= t.rows() ? t.rows() / plan.sample_rows : 0;
  int groups_of_tile = 1;
  if (s.groups) {
    const int channels = s.out_channels / s.groups;
    groups_of_tile =
        std::min(s.groups, channels % t.columns() == 0 || t.columns() % channels == 0 ? ceil_div(t.columns(), channels)
                                                                                      : t.columns() / channels + 2);
    if (plan.samples) plan.samples = std::min(plan.samples, kMaxPairs / groups_of_tile);
    if (groups_of_tile > kMaxPairs || plan.sample_rows < 1) return false;
    if (plan.column_tiles > 1 && t.columns() % channels)
      plan.span = std::min(plan.column_tiles, channels % t.columns() ? (channels - 2 + t.columns()) / t.columns() + 1
                                                                     : channels / t.columns());
  }
  plan.samples = std::min(plan.samples, samples);
  plan.tiles_per_sample = plan.samples ? 1 : ceil_div(plan.sample_rows, t.rows());
  plan.row_tiles = plan.samples ? ceil_div(samples, plan.samples) : samples * plan.tiles_per_sample;
  const int pairs = std::max(1, plan.samples) * groups_of_tile;
  plan.sub = std::max(1, kWarps / pairs);
  plan.exchange = s.groups && (plan.tiles_per_sample > 1 || plan.span > 1);
  return true;
}

// One multiprocessor of Hopper: L2 delivers 40 bytes a clock to it, 2400 to all; tensor cores by mma.sync multiply
// 1100 pairs of 16 bits a clock, half as many of TF32. An exchange through L2 takes 1500 clocks, what comes
// before and after the loop 2500.
double clocks_of(const Shape& s, const ConvPlan& plan, const Device& device) {
  const Tiling& t = kTilings[plan.tiling];
  const double per_split = static_cast<double>(plan.chunks) / plan.splits;
  const double bytes = static_cast<double>(plan.stages) / plan.splits * t.stage_bytes();
  const double pairs = per_split * t.rows() * t.columns() * (kChunkBytes / element_size(s.dtype));
  const int blocks = plan.blocks(), waves = ceil_div(blocks, resident_blocks(plan.tiling, device)),
            together = ceil_div(std::min(blocks, resident_blocks(plan.tiling, device)), device.multiprocessors);
  const double rate = s.dtype == DType::kFloat32 ? 450 : 1100;
  const double warps = t.warps_m * t.warps_n * t.warps_k * t.m_tiles * t.n_tiles >= 32 ? 1 : 0.6;
  double one = std::max(bytes * together / 40, pairs * together / (rate * warps));
  one = std::max(one, bytes * std::min(blocks, resident_blocks(plan.tiling, device)) / 2400);
  one += static_cast<double>(plan.stages) / plan.splits / t.warps_k * 60;  // synchronisation
  const double sums = t.rows() * t.columns() * 4.0;
  if (plan.splits > 1) one += 1500 + sums * (s.groups ? plan.splits : 2) / 40;
  if (plan.exchange) one += 1500;
  one += sums * 3 / 128 + sums / 40;
  // What was measured beyond this: the latency of large tiles where no other block hides it, and of splits.
  const bool alone = t.rows() >= 128 && plan.row_tiles * plan.column_tiles < device.multiprocessors;
  return (waves * one + 2500) * (alone ? 1.6 : 1) * (plan.splits > 1 ? 1.1 : 1);
}

std::vector<Choice> candidates(const Shape& s, const Device& device) {
  std::vector<Choice> made;
  for (int tiling = 0; tiling < kNumTilings; tiling++)
    for (const int splits : {1, 2, 3, 4, 6, 8}) {
      Choice c;
      if (!make_plan(s, tiling, splits, c.plan)) continue;
      const int resident = resident_blocks(tiling, device);
      if (resident == 0 || (c.plan.splits > 1 && c.plan.blocks() > resident)) continue;
      c.deferred = c.plan.exchange && c.plan.blocks() > resident;
      c.clocks = clocks_of(s, c.plan, device);
      if (c.deferred)
        c.clocks += 4000 + 3.0 * s.batch * s.out_height * s.out_width * s.out_channels * element_size(s.dtype) / 2400;
      made.push_back(c);
    }
  std::stable_sort(made.begin(), made.end(), [](const Choice& a, const Choice& b) { return a.clocks < b.clocks; });
  return made;
}

Choice choose(const Shape& s, const Device& device) {
  const auto all = candidates(s, device);
  return all.empty() ? Choice{} : all.front();
}

}  // namespace dpa::kernels::conv2d
