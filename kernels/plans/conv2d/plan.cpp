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
  if (t.taps == 1 && !t.im2col) return true;
  if (pieces_of(s.dtype, s.channels) % kChunkPieces != 0) return false;
  if (t.im2col) return s.stride <= 8 && s.pad_top < 128 && s.pad_left < 128;  // what tensor maps have place for
  return s.stride == 1 && s.kernel_width == t.taps && s.out_height == s.height && s.out_width == s.width;
}

int stages_of(const Tiling& t, const Shape& s) { return chunks_of(s) / t.taps; }

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
  plan.sub = std::max(1, kWarps / pairs), plan.moments = pairs * plan.sub;
  plan.exchange = s.groups && (plan.tiles_per_sample > 1 || plan.span > 1);
  return true;
}

namespace {

// What a block takes for the stages of its tile.
double clocks_of_stages(const Shape& s, const ConvPlan& plan, int blocks, int together) {
  const Tiling& t = kTilings[plan.tiling];
  const bool tf32 = s.dtype == DType::kFloat32;
  const int steps = ceil_div(plan.stages, plan.splits * t.warps_k);  // of a team
  const double chunks = t.warps_k * t.taps, bytes = static_cast<double>(t.warps_k) * t.stage_bytes();
  const double pairs = chunks * t.rows() * t.columns() * kChunkBytes / element_size(s.dtype);
  if (t.im2col) {  // the tensor cores' rate; a stage has arrived when those before it in the buffer have been multiplied
    const double multiply = together * pairs / (tf32 ? 1024 : 2048);
    return steps * std::max({multiply, bytes * blocks / 6850, (1270 + multiply) / (t.stages - 1)});
  }
  if (t.wgmma) {  // a stage ends with what is in flight; registers are loaded, and rounded to tf32
    const double multiply = together * pairs / 2048 * (tf32 ? 1.57 : 0.385) + (t.taps > 1 ? 1950 : 968);
    return steps * std::max(multiply, bytes * blocks / 6850);
  }
  double rate = tf32 ? 450 : 883;
  if (together == 1) rate *= 0.445;  // no other block hides its latency
  const double fragments = chunks * t.warps_m * t.warps_n * (t.m_tiles + t.n_tiles) * 2048;
  double one = std::max({bytes * together / 49, bytes * blocks / 3420, fragments * together / 80.3});
  if (t.warps_m * t.warps_n * t.warps_k * t.m_tiles * t.n_tiles >= 32) one = std::max(one, pairs * together / rate);
  return steps * (one + 299);
}

}  // namespace

// Fitted to 6400 plans of ResNet-18's launches measured on an H200, from 6 to 600 us: a typical error of 9 % near the best ones.
// What it chooses takes 0.3 % longer than the best ones together, 1.11 times at the most; launches with a shortcut, which it
// does not count, 0.9 % and 1.21 times.
double clocks_of(const Shape& s, const ConvPlan& plan, const Device& device, int networks) {
  const Tiling& t = kTilings[plan.tiling];
  const int blocks = plan.blocks() * networks, resident = resident_blocks(plan.tiling, device);
  const int together = ceil_div(std::min(blocks, resident), device.multiprocessors);
  // A block begins where another ends: the busiest multiprocessor's blocks, so many at a time.
  const double waves = blocks <= resident ? 1.0
                                          : static_cast<double>(ceil_div(blocks, device.multiprocessors)) *
                                                device.multiprocessors / resident;
  double one = clocks_of_stages(s, plan, std::min(blocks, resident), together);
  const double sums = t.rows() * t.columns() * 4.0;
  if (plan.splits > 1) one += 2600 + sums * (s.groups ? 0.567 * plan.splits : 2.4 + 0.1 * plan.splits) / 10.8;
  // Rows are dealt out to the splits, whose moments then take as long as those of the split with most of them.
  if (s.groups && t.rows() % plan.splits) one += 1160;
  if (plan.exchange) one += 2160 + 47 * plan.parts();
  // The epilogue.
  one += sums * together / (t.im2col ? 15.5 : t.wgmma ? 7.92 : 18.1) + (t.im2col ? 2720 : t.wgmma ? 0 : 540);
  if (s.groups) one += sums * together / 11.2 + 1740.0 * plan.moments / kWarps;
  return waves * one + 1130 + 3.6 * blocks;
}

/// What a second pass costs that normalises: it reads and writes what the first one wrote.
double clocks_of_deferral(const Shape& s, int networks) {
  return 3000 + 0.0006 * networks * s.batch * s.out_height * s.out_width * s.out_channels * element_size(s.dtype);
}

std::vector<Choice> candidates(const Shape& s, const Device& device, int networks) {
  std::vector<Choice> made;
  for (int tiling = 0; tiling < kNumTilings; tiling++)
    for (const int splits : {1, 2, 3, 4, 6, 8}) {
      Choice c;
      if ((kTilings[tiling].wgmma && !device.wgmma) || !make_plan(s, tiling, splits, c.plan)) continue;
      const int resident = resident_blocks(tiling, device), blocks = c.plan.blocks() * networks;
      if (resident == 0 || (c.plan.splits > 1 && blocks > resident)) continue;
      c.deferred = c.plan.exchange && blocks > resident;
      c.clocks = clocks_of(s, c.plan, device, networks);
      if (c.deferred) c.clocks += clocks_of_deferral(s, networks);
      made.push_back(c);
    }
  std::stable_sort(made.begin(), made.end(), [](const Choice& a, const Choice& b) { return a.clocks < b.clocks; });
  return made;
}

Choice choose(const Shape& s, const Device& device, int networks) {
  const auto all = candidates(s, device, networks);
  return all.empty() ? Choice{} : all.front();
}

// As StemTile in conv2d/stem.cuh, which asserts it.
int stem_bytes(DType dtype) {
  const int high = 2 * kStemPooledHeight + 1, wide = 2 * kStemPooledWidth + 1, pieces = pieces_of(dtype, 12);
  const int weights = 2 * pieces * kStemColumns * kChunkBytes;
  const int cells = (((high + 3) * (wide + 3) * kPieceBytes + 64) * pieces + 127) / 128 * 128;
  return kStemColumns * 8 + 128 + weights + 2 * cells + high * wide * (kStemColumns + 8) * element_size(dtype);
}

bool serves_stem(const Shape& s, const Device& device) {
  return s.channels == 12 && s.kernel_height == 4 && s.kernel_width == 4 && s.stride == 1 && s.pad_top == 2 &&
         s.pad_left == 2 && s.out_channels == kStemColumns && s.groups == 0 &&
         stem_bytes(s.dtype) + 1024 <= device.shared;
}

int stem_blocks(const Shape& s, const Device& device, int networks) {
  const int resident = device.multiprocessors * std::min(2, device.shared / (stem_bytes(s.dtype) + 1024));
  const auto tiles = [](int size, int tile) { return ceil_div(ceil_div(size, 2), tile); };
  return std::max(1, std::min(s.batch * tiles(s.height, kStemPooledHeight) * tiles(s.width, kStemPooledWidth),
                              resident / networks));
}

}  // namespace dpa::kernels::conv2d
