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
         pieces % kChunkPieces == 0;
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
  plan.sub = std::max(1, kWarps / pairs);
  plan.exchange = s.groups && (plan.tiles_per_sample > 1 || plan.span > 1);
  return true;
}

// Fitted to 2800 plans measured on an H200, from 6 to 550 us: a typical error of 10 % near the best ones; the layers that it
// chooses take 1 to 3 % longer than the best ones. L2 delivers 90 bytes a clock to a multiprocessor, 3500 to all; shared
// memory 68. Tensor cores multiply 1670 pairs of 16 bits a clock by wgmma and 1190 by mma.sync; a block alone, where no
// other hides its latency, does less of it, but for tiles of 128 columns, the less the smaller its tile is.
double clocks_of(const Shape& s, const ConvPlan& plan, const Device& device, int networks) {
  const Tiling& t = kTilings[plan.tiling];
  const int steps = ceil_div(plan.stages, plan.splits * t.warps_k);  // of a team
  const double stages = steps * t.warps_k, chunks = stages * t.taps, bytes = stages * t.stage_bytes();
  const double pairs = chunks * t.rows() * t.columns() * kChunkBytes / element_size(s.dtype);
  const double fragments = chunks * t.warps_m * t.warps_n * (t.m_tiles + t.n_tiles) * 2048;
  const int blocks = plan.blocks() * networks, resident = resident_blocks(plan.tiling, device);
  const int together = ceil_div(std::min(blocks, resident), device.multiprocessors);
  // A block begins where another ends: the busiest multiprocessor's blocks, so many at a time.
  const double waves = blocks <= resident ? 1.0
                                          : static_cast<double>(ceil_div(blocks, device.multiprocessors)) *
                                                device.multiprocessors / resident;
  double rate = t.wgmma ? 1670 : 1190;
  if (s.dtype == DType::kFloat32) rate /= t.wgmma ? 2.11 : 2.21;
  if (together == 1) rate *= t.wgmma ? (t.n_tiles > 4 ? 1.0 : t.m_tiles > 1 ? 0.81 : 0.65) : 0.4;
  double one = std::max(bytes * together / 90, bytes * std::min(blocks, resident) / 3490);
  const bool large = t.warps_m * t.warps_n * t.warps_k * t.m_tiles * t.n_tiles >= 32;
  if (t.wgmma || large) one = std::max(one, pairs * together / rate);
  if (!t.wgmma) one = std::max(one, fragments * together / 68);
  one += steps * (t.wgmma ? (t.taps > 1 ? 765 : 602) : 188);  // a stage of warpgroups ends with what is in flight
  const double sums = t.rows() * t.columns() * 4.0;
  if (plan.splits > 1) one += 1190 + sums * (s.groups ? 0.81 * plan.splits : 2) / 10.8;
  // Rows are dealt out to the splits, whose moments then take as long as those of the split with most of them.
  if (s.groups && t.rows() % plan.splits) one += 1160;
  if (plan.exchange) one += 2480 + 17 * plan.parts();
  one += sums * together / (t.wgmma ? 8.9 : 6.9);  // the epilogue
  if (s.groups) one += 4220;
  return waves * one + 1130 + 3.1 * blocks;
}

/// What a second pass costs that normalises: it reads twice and writes once what the first one wrote, rounded.
double clocks_of_deferral(const Shape& s, int networks) {
  return 8270 + 0.0018 * networks * s.batch * s.out_height * s.out_width * s.out_channels * element_size(s.dtype);
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
