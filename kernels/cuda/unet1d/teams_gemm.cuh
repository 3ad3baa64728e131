// The GEMM of a team's warp: its share of K of a row tile, 16 output channels times up to 64 columns. The next pair of
// steps is loaded while one is multiplied. A warp has few others to hide behind: what counts is how many instructions a
// pair takes. So a warp's weights are a list of pairs, all of them whole, and a pair takes copies, loads and MMAs alone.
#pragma once
#include "kernels/cuda/unet1d/phases_input.cuh"

namespace dpa::kernels::unet1d::device {

// A tile's fragments as the buffer has them, and ready for the MMAs. kScale: a factor that the sums lack.
template <class Tile>
struct Weights {
  static constexpr float kScale = 1.0f;
  uint4 v;
  DPA_DEVICE void load(uint32_t at) { v = load_shared_16(at); }
  DPA_DEVICE Fragments<Tile> ready() const { return {v}; }
};
template <>
struct Weights<TileE4m3> {
  static constexpr float kScale = kWidenedE4m3;
  uint2 v;
  DPA_DEVICE void load(uint32_t at) { v = load_shared_8(at); }
  DPA_DEVICE Fragments<TileE4m3> ready() const {
    return {
        make_uint4(widen_e4m3<0x1404>(v.x), widen_e4m3<0x3424>(v.x), widen_e4m3<0x1404>(v.y), widen_e4m3<0x3424>(v.y))};
  }
};
template <>
struct Weights<TileFp32> {
  static constexpr float kScale = 1.0f;
  uint4 v[2];
  DPA_DEVICE void load(uint32_t at) { v[0] = load_shared_16(at), v[1] = load_shared_16(at + 512); }
  DPA_DEVICE Fragments<TileFp32> ready() const {
    Fragments<TileFp32> f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      f.split(v[h].x, f.high[h].x, f.low[h].x), f.split(v[h].y, f.high[h].y, f.low[h].y);
      f.split(v[h].z, f.high[h].z, f.low[h].z), f.split(v[h].w, f.high[h].w, f.low[h].w);
    }
    return f;
  }
};

// A warp's stream of weights: its pairs of tiles of all phases of a step, again and again. A lane copies the bytes that
// it reads. Of e4m3 those are 8, and copies of 8 bytes would go through L1: there a lane copies 16 of the pair's.
struct TeamPairs {
  const uint32_t* begin;  // of this warp, in shared memory: the first tile, and from bit 22 tiles from it to the second
  int count;              // at least one
};
template <class Tile>
struct TeamStream {
  static constexpr int kLane = Tile::kWide ? 16 : Tile::kBytes / 32, kPair = 2 * Tile::kBytes;
  static constexpr bool kHalves = kLane == 8;  // half a warp copies a tile
  static constexpr TeamSlots kSlots = team_slots(Tile::kBytes);
  const uint8_t* weights;            // this lane's place in the first tile
  const uint32_t *at, *begin, *end;  // the pair behind `next`
  uint32_t next;                     // the pair to copy
  int slots;
  uint32_t buffer, buffer_end, slot, last;  // this lane's places: of the pair to consume, of the pair before

  DPA_DEVICE TeamStream(const uint8_t* tiles, const TeamPairs& pairs, int first_slot, int slots_)
      : weights(tiles + (thread() & (kHalves ? 15 : 31)) * 16),
        at(pairs.begin),
        begin(pairs.begin),
        end(pairs.begin + pairs.count),
        slots(slots_) {
    buffer = shared_address(shared()) + first_slot + (thread() >> 5) * slots * kPair + (thread() & 31) * kLane;
    slot = buffer, last = buffer + (slots - 1) * kPair, buffer_end = last + kPair;
    fetch();
#pragma unroll 1
    for (int i = 0; i < slots - 1; i++) issue(buffer + i * kPair);
  }
  DPA_DEVICE void fetch() {
    next = *at++;
    if (at == end) at = begin;
  }
  static DPA_DEVICE void copy(uint32_t to, const uint8_t* tile) {
    copy_16(to, tile);
    if constexpr (Tile::kWide) copy_16(to + 512, tile + 512);
  }
  DPA_DEVICE void issue(uint32_t to) {
    const uint32_t first = (next & 0x3fffff) * Tile::kBytes, apart = (next >> 22) * Tile::kBytes;
    const uint8_t* from = weights + first;
    fetch();
    if constexpr (kHalves) {
      const int lane = thread() & 31;
      copy(to + lane * (16 - kLane), from + (lane & 16 ? apart : 0));
    } else {
      copy(to, from);
      copy(to + Tile::kBytes, from + apart);
    }
    copies_commit();
  }
  // The next pair is in its slot; returns this lane's address there.
  DPA_DEVICE uint32_t wait() const {
    copies_wait<kSlots.most - 2>();
    if (slots < kSlots.most) copies_wait<kSlots.middle - 2>();
    if (slots < kSlots.middle) copies_wait<kSlots.least - 2>();
    if constexpr (kHalves) sync_warp();
    return slot;
  }
  // Fills the slot before it again, whose fragments have been multiplied, and goes on to the next.
  DPA_DEVICE void advance() {
    issue(last);
    last = slot;
    slot += kPair;
    if (slot == buffer_end) slot = buffer;
  }
};

// A lane's rows of the slab, one for every load of four matrices, relative to the slab.
template <class Tile, int kColumnTiles>
struct OperandRows {
  static constexpr bool kWide = Tile::kWide, kOne = !kWide && kColumnTiles == 1;
  static constexpr int kLoads = kWide || kOne ? kColumnTiles : kColumnTiles / 2;  // a step; kOne: a pair of steps
  uint32_t at[kLoads];
  DPA_DEVICE OperandRows(const int* columns, int num_columns) {
    const int lane = thread() & 31;
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      int column = (kWide || kOne ? i * 8 : i * 16 + (lane >> 4) * 8) + (lane & 7);
      if (column >= num_columns) column = 0;
      const int part = kWide ? (lane >> 3) * 16 : (lane >> 3 & 1) * 16;
      at[i] = held(columns[column] + part);
    }
  }
  // The same relative to nothing.
  DPA_DEVICE OperandRows from(uint32_t slab) const {
    OperandRows r = *this;
#pragma unroll
    for (int i = 0; i < kLoads; i++) r.at[i] += slab;
    return r;
  }
};

// The sums of a run. `other`: of every second step where there is a single column tile, of the small terms of float32
// where there are few; a chain of MMAs on one accumulator would take most of the time.
template <class Tile, int kColumnTiles>
struct RunSums {
  using Rows = OperandRows<Tile, kColumnTiles>;
  static constexpr int kOthers = Rows::kOne ? 1 : Tile::kWide && kColumnTiles <= 2 ? 2 * kColumnTiles : 0;
  float (&sum)[kColumnTiles][4];
  float other[kOthers > 0 ? kOthers : 1][4] = {};

  // Load i of a step.
  DPA_DEVICE void multiply(const Fragments<Tile>& a, int i, const uint32_t (&b)[4]) {
    using Math = typename Tile::Math;
    if constexpr (Tile::kWide) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; j++) a.split(b[j], high[j], low[j]);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        mma(Math{}, kOthers ? other[2 * i] : sum[i], a.low[h], high[2 * h], high[2 * h + 1]);
        mma(Math{}, kOthers ? other[2 * i + 1] : sum[i], a.high[h], low[2 * h], low[2 * h + 1]);
        mma(Math{}, sum[i], a.high[h], high[2 * h], high[2 * h + 1]);
      }
    } else {
      mma(Math{}, sum[2 * i], a.a, b[0], b[1]);
      mma(Math{}, sum[2 * i + 1], a.a, b[2], b[3]);
    }
  }
  DPA_DEVICE void finish() {
#pragma unroll
    for (int i = 0; i < kOthers; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) sum[Rows::kOne ? 0 : i / 2][j] += other[i][j];
    }
  }
};

// Two steps along K in registers.
template <class Tile, int kColumnTiles>
struct OperandPair {
  using Rows = OperandRows<Tile, kColumnTiles>;
  struct Offsets {  // of the two steps in the slab; kOne: this lane's, of one of them
    int first, second;
  };
  Weights<Tile> a[2];
  uint32_t b[Rows::kOne ? 1 : 2][Rows::kLoads][4];

  static DPA_DEVICE Offsets offsets(const int* p) {
    if constexpr (Rows::kOne) return {p[thread() >> 4 & 1], 0};
    return {p[0], p[1]};
  }
  DPA_DEVICE void load_weights(uint32_t at) { a[0].load(at), a[1].load(at + Tile::kBytes); }
  DPA_DEVICE void load(const Rows& rows, const Offsets& o) {
#pragma unroll
    for (int i = 0; i < Rows::kLoads; i++) {
      load_matrices(b[0][i], rows.at[i] + o.first);
      if constexpr (!Rows::kOne) load_matrices(b[1][i], rows.at[i] + o.second);
    }
  }
  DPA_DEVICE void multiply(RunSums<Tile, kColumnTiles>& sums) const {
    using Math = typename Tile::Math;
    if constexpr (Rows::kOne) {
      mma(Math{}, sums.sum[0], a[0].ready().a, b[0][0][0], b[0][0][1]);
      mma(Math{}, sums.other[0], a[1].ready().a, b[0][0][2], b[0][0][3]);
    } else {
#pragma unroll
      for (int s = 0; s < 2; s++) {
        const Fragments<Tile> f = a[s].ready();
#pragma unroll
        for (int i = 0; i < Rows::kLoads; i++) sums.multiply(f, i, b[s][i]);
      }
    }
  }
};

// Multiplies `pairs` pairs of steps, whose offsets in the slab are given. `receive` is called before the slab is read.
template <class Tile, int kColumnTiles, class Receive>
DPA_DEVICE void multiply_run(TeamStream<Tile>& stream, const int* offsets, int pairs,
                             const OperandRows<Tile, kColumnTiles>& rows, float (&sum)[kColumnTiles][4],
                             Receive receive) {
  using Pair = OperandPair<Tile, kColumnTiles>;
  RunSums<Tile, kColumnTiles> sums = {sum};
  auto load = [&](Pair& to, auto between) {
    const auto now = Pair::offsets(offsets);
    offsets += 2;
    to.load_weights(stream.wait());
    between();
    to.load(rows, now);
  };
  if constexpr (kColumnTiles <= (Tile::kWide ? 1 : 2)) {  // registers for two pairs
    Pair even, odd;
    auto step = [&](const Pair& now, Pair& next) {
      stream.advance();
      load(next, [] {});
      now.multiply(sums);
    };
    load(even, receive);
#pragma unroll 1
    for (; pairs > 2; pairs -= 2) step(even, odd), step(odd, even);
    if (pairs > 1) {
      step(even, odd);
      stream.advance();
      odd.multiply(sums);
    } else {
      stream.advance();
      even.multiply(sums);
    }
  } else {
    Pair pair;
    load(pair, receive);
#pragma unroll 1
    for (; pairs > 1; pairs--) {
      pair.multiply(sums);
      stream.advance();
      load(pair, [] {});
    }
    pair.multiply(sums);
    stream.advance();
  }
  sums.finish();
}

}  // namespace dpa::kernels::unet1d::device
