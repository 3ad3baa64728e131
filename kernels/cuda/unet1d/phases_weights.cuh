// A warp's private stream of weights. The stream is the sequence of the warp's runs (a row tile's steps along K) over
// all phases and steps of the loop; it does not depend on activations, so it runs ahead over phases. Every lane copies
// exactly the bytes that it reads as its fragments: no barrier, not even of the warp.
#pragma once
#include "kernels/cuda/unet1d/phases_device.cuh"
#include "kernels/plans/unet1d/phases.h"

namespace dpa::kernels::unet1d::device {

// Element types: of a tile's weights, of the fragments that they become.
struct TileBf16 {
  using Math = BFloat16;
  static constexpr int kBytes = 512, kSlots = kPhaseSlots;
  static constexpr bool kWide = false, kScaled = false;
};
struct TileFp16 : TileBf16 {
  using Math = Half;
};
struct TileE4m3 {
  using Math = Half;
  static constexpr int kBytes = 256, kSlots = kPhaseE4m3Slots;
  static constexpr bool kWide = false, kScaled = true;
};
struct TileFp32 {
  using Math = float;
  static constexpr int kBytes = 1024, kSlots = kPhaseWideSlots;
  static constexpr bool kWide = true, kScaled = false;
};

// A number of a phase, loaded here: without it the compiler moves the load behind the branch that needs it, and a chain
// of such loads and branches is most of what a phase begins with.
DPA_DEVICE int loaded(int x) { return static_cast<int>(held(static_cast<uint32_t>(x))); }

// x / d for 0 <= x < 2^20, d > 0: five instructions. x + 1/2 is at least 1 / (2 d) away from a multiple, relative to d.
DPA_DEVICE int divide(int x, int d) {
  return static_cast<int>(quotient(static_cast<float>(x) + 0.5f, static_cast<float>(d)));
}

// Slice i of n parts of `count`.
DPA_DEVICE int slice_begin(int count, int i, int n) { return divide(count * i, n); }

// Division by a number that is known long before: magic as magic_of.
struct Divisor {
  int by;
  uint32_t magic;
  DPA_DEVICE void set(int n) { by = n > 0 ? n : 1, magic = by > 1 ? 0xffffffffu / static_cast<uint32_t>(by) + 1 : 0; }
  DPA_DEVICE int operator()(int x) const {
    return by == 1 ? x : static_cast<int>(high_product(static_cast<uint32_t>(x), magic));
  }
};

// The steps along K that a warp multiplies for a row tile of a segment: where they begin, their number.
struct WarpSteps {
  int begin, count;
};
struct TileAt {
  int in, out, batch;
};
// A phase and the tile of it that the block works at, in the numbers that its parts need. Made before the loop, for
// divisions take long (again for each tile where a block has several), and in shared memory while the phase runs.
struct Work {
  Phase p;
  TileAt at;
  int sample0, samples, rows;                  // rows: (sample, time) pairs of the input
  int unit0, units, value_channels, channels;  // of the slice; channels: of value and skip, each in steps of 16
  int slab_value, slab_channels;               // the same in the slab, where every unit is padded to 16
  int spread;                                  // whether that makes a difference
  int slab_pitch, sample_pitch;                // bytes from row to row, from sample to sample (slab_row, slab_sample)
  int first_channel, real_channels;            // absolute; without padding
  int groups, parts;                           // of the slice; warps that share a (sample, group) pair's statistics
  int first_tile, row_tiles, rounds;           // row tiles of the output slice
  int values_each;                             // of a thread, where a tile is finished as one group; else 0
  float inverse_count;                         // 1 / values of a (sample, group) pair
  Divisor by_times, by_chunks, by_floats, by_quads, by_value, by_groups, by_parts, by_columns, by_rows, by_per_tap,
      by_taps[2], by_unit;
  int all_steps[2];  // of a segment, along K
  WarpSteps steps[2][kPhaseWarps];
  signed char warp_row[kPhaseWarps], warp_column[kPhaseWarps];

  DPA_DEVICE void fill_tile(int tile, int batch, int element) {
    const int rest = divide(tile, p.slices_in);
    at.in = tile - rest * p.slices_in;
    at.batch = divide(rest, p.slices_out), at.out = rest - at.batch * p.slices_out;
    sample0 = at.batch * p.samples;
    samples = batch - sample0 < p.samples ? batch - sample0 : p.samples;
    rows = samples * p.times_in;
    unit0 = slice_begin(p.units, at.in, p.slices_in);
    units = slice_begin(p.units, at.in + 1, p.slices_in) - unit0;
    first_channel = unit0 * p.unit_channels, real_channels = units * p.unit_channels;
    value_channels = (real_channels + 15) / 16 * 16, channels = value_channels * (1 + p.joined);
    slab_value = units * p.unit_padded, slab_channels = slab_value * (1 + p.joined);
    spread = slab_value != value_channels;
    groups = p.group_channels ? divide(real_channels, p.group_channels) : 0;
    const int pairs = samples * groups;
    parts = pairs == 0 || pairs >= kPhaseWarps ? 1 : divide(kPhaseWarps, pairs);
    const bool alone = p.kind == PhaseKind::kFinish && p.value.kind == SourceKind::kPartials &&
                       p.residual.kind != SourceKind::kHead && pairs == 1 && real_channels == value_channels;
    values_each = !alone ? 0 : divide(rows * value_channels + kPhaseWarps * 32 - 1, kPhaseWarps * 32);
    first_tile = slice_begin(p.row_tiles, at.out, p.slices_out);
    row_tiles = slice_begin(p.row_tiles, at.out + 1, p.slices_out) - first_tile;
    rounds = divide(row_tiles + p.warps_rows - 1, p.warps_rows);
    inverse_count = p.group_channels ? 1.0f / static_cast<float>(p.counted * p.times_in) : 0.0f;
    by_times.set(p.times_in), by_chunks.set(value_channels / 8), by_floats.set(value_channels / 4);
    by_quads.set(channels / 4), by_value.set(value_channels), by_groups.set(groups), by_parts.set(parts);
    by_columns.set(p.columns), by_rows.set(row_tiles);
    by_per_tap.set((1 + p.joined) * (p.unit_padded >> 4)), by_unit.set(p.unit_channels);
    for (int s = 0; s < 2; s++) {
      by_taps[s].set(p.segments[s].taps);
      all_steps[s] = s < p.num_segments ? units * (1 + p.joined) * p.segments[s].taps * (p.unit_padded >> 4) : 0;
    }
    slab_pitch = slab_row(slab_channels, element), sample_pitch = slab_sample(p.times_in, p.pad, slab_pitch);
  }
  // After fill_tile: a warp's part of a segment.
  DPA_DEVICE void fill_warp(int segment, int warp) {
    const int rest = divide(warp, p.warps_k), k = warp - rest * p.warps_k, column = divide(rest, p.warps_rows);
    warp_column[warp] = static_cast<signed char>(column);
    warp_row[warp] = static_cast<signed char>(rest - column * p.warps_rows);
    const int all = all_steps[segment], begin = divide(all * k, p.warps_k);
    steps[segment][warp] = {begin, column < p.warps_columns ? divide(all * (k + 1), p.warps_k) - begin : 0};
  }
};
static_assert(sizeof(Work) <= kPhaseEntry && kPhaseEntry % 16 == 0, "the plan leaves room for a table of these");

// A warp's runs of a step, made before the loop.
struct Runs {
  PhaseRun* begin;
  int count;
};

template <class Tile>
struct WeightStream {
  const uint8_t* weights;       // this lane's place
  const PhaseRun *begin, *end;  // this warp's runs of a step
  int steps;                    // left, with the one that `at` is in
  int slots;                    // Tile::kSlots, fewer_slots of it, kPhaseFewSlots or kPhaseLeastSlots
  const PhaseRun* at = nullptr;
  PhaseRun next = {0, 0};  // *at, loaded a run ahead
  const uint8_t* from = nullptr;
  int left = 0, stride = 0;           // tiles of the current run; bytes from one to the next
  uint32_t buffer = 0;                // this lane's place in slot 0
  uint32_t slot = 0, buffer_end = 0;  // in the slot of the next pair to consume; behind all slots

  static constexpr int kLane = Tile::kWide ? 16 : Tile::kBytes / 32, kPair = 2 * Tile::kBytes;

  DPA_DEVICE WeightStream(const uint8_t* tiles, const Runs& runs, int steps_, int slots_)
      : weights(held(tiles + (thread() & 31) * kLane)),
        begin(runs.begin),
        end(runs.begin + runs.count),
        steps(runs.count ? steps_ : 0),
        slots(slots_),
        at(runs.begin) {
    if (steps > 0) next = *at;
    buffer = shared_address(shared()) + (thread() >> 5) * slots * kPair + (thread() & 31) * kLane;
    slot = buffer, buffer_end = buffer + slots * kPair;
#pragma unroll 1
    for (int i = 0; i < slots; i++) refill();
  }
  static DPA_DEVICE void copy(uint32_t to, const uint8_t* tile) {
    if constexpr (kLane == 8) {
      copy_async_8(to, tile);
    } else {
      copy_async_line_16(to, tile);
      if constexpr (Tile::kWide) copy_async_line_16(to + 512, tile + 512);
    }
  }
  // Fills the slot, of which this lane has loaded its bytes, and goes on to the next one. No other lane reads them.
  DPA_DEVICE void refill() {
    if (left <= 0 && steps > 0) {
      from = weights + static_cast<size_t>(next.from) * 16;
      left = static_cast<int>(next.tiles & 0xffff), stride = static_cast<int>(next.tiles >> 16) * Tile::kBytes;
      if (++at == end) at = begin, steps--;
      next = *at;
    }
    if (left > 0) copy(slot, from);
    if (left > 1) copy(slot + Tile::kBytes, from + stride);
    from += 2 * stride, left -= 2;
    copy_async_commit();
    slot += kPair;
    if (slot == buffer_end) slot = buffer;
  }
  // The next pair of tiles is in its slot; returns this lane's address there.
  DPA_DEVICE uint32_t wait() const {
    if (slots == Tile::kSlots)
      copy_async_wait<Tile::kSlots - 1>();
    else if (slots == fewer_slots(Tile::kSlots))
      copy_async_wait<fewer_slots(Tile::kSlots) - 1>();
    else if (slots == kPhaseFewSlots)
      copy_async_wait<kPhaseFewSlots - 1>();
    else
      copy_async_wait<kPhaseLeastSlots - 1>();
    return slot;
  }
};

}  // namespace dpa::kernels::unet1d::device
