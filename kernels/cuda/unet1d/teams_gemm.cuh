// The GEMM of a team's warp: its share of K of a row tile, 16 output channels times up to 64 columns. A warp has few
// others to hide behind: what counts is its chain of instructions, whatever the bytes. So a warp's weights are a list of
// slots of the buffer, of four steps along K where a tile is small, and while one is multiplied the next is loaded, and
// the offsets of the one behind it.
#pragma once
#include "kernels/cuda/unet1d/phases_input.cuh"
#include "kernels/plans/unet1d/teams.h"

namespace dpa::kernels::unet1d::device {

// A warp's stream of weights: its slots of tiles of all phases of a step, again and again. A lane copies the bytes that
// it reads.
struct TeamLoads {
  const uint32_t* begin;  // of this warp, in shared memory, an entry a slot: team_load
  int count;              // at least one
};
// `tile`: the first one's number; `apart`: from a step's tile to the next one's; `half`: only two steps.
DPA_DEVICE uint32_t team_load(int64_t tile, int apart, bool half) {
  return static_cast<uint32_t>(tile) | static_cast<uint32_t>(half) << 22 | static_cast<uint32_t>(apart) << 23;
}
template <class Tile>
struct TeamStream {
  static constexpr int kTiles = team_slot_tiles(Tile::kBytes), kSlot = kTiles * Tile::kBytes;
  static constexpr TeamSlots kSlots = team_slots(Tile::kBytes);
  const uint8_t* weights;   // this lane's place in the first tile
  uint32_t at, begin, end;  // addresses in the list: of the entry behind `next`
  uint32_t next;            // the slot to copy
  int slots;
  uint32_t buffer, buffer_end, slot, last;  // this lane's places: of the slot to consume, of the slot before
  bool due = false;                         // whether the last slot is still to be filled again

  DPA_DEVICE TeamStream(const uint8_t* tiles, const TeamLoads& loads, int first_slot, int slots_)
      : weights(tiles + (thread() & 31) * 16),
        at(shared_address(loads.begin)),
        begin(at),
        end(at + loads.count * 4),
        slots(slots_) {
    buffer = shared_address(shared()) + first_slot + (thread() >> 5) * slots * kSlot + (thread() & 31) * 16;
    slot = buffer, buffer_end = buffer + slots * kSlot;
    fetch();
#pragma unroll 1
    for (last = buffer; last != buffer_end; last += kSlot) refill();
  }
  DPA_DEVICE void fetch() {
    next = load_shared_word(at);
    at += 4;
    if (at == end) at = begin;
  }
  static DPA_DEVICE void copy(uint32_t to, const uint8_t* tile) {
    copy_async_line_16(to, tile);
    if constexpr (Tile::kWide) copy_async_line_16(to + 512, tile + 512);
  }
  // The next slot is there; returns this lane's address in it.
  DPA_DEVICE uint32_t wait() const {
    copy_async_wait<kSlots.most - 2>();
    if (slots < kSlots.most) copy_async_wait<kSlots.middle - 2>();
    if (slots < kSlots.middle) copy_async_wait<kSlots.least - 2>();
    return slot;
  }
  // Goes on to the next slot; the one before is due to be filled again.
  DPA_DEVICE void advance() {
    last = slot;
    slot += kSlot;
    if (slot == buffer_end) slot = buffer;
  }
  // The last slot of a run is filled again once the run's sums are on their way, or before another slot is waited for.
  DPA_DEVICE void refill_if_due() {
    if (due) refill();
    due = false;
  }
  // After the last slot has been multiplied: copies the list's next into it.
  DPA_DEVICE void refill() {
    const uint32_t apart = (next >> 23) * Tile::kBytes, second = next >> 22 & 1 ? 0 : 2 * apart;
    const uint8_t* from = weights + (next & 0x3fffff) * Tile::kBytes;
    fetch();
    copy(last, from);
    copy(last + Tile::kBytes, from + apart);
    if constexpr (kTiles == 4) {
      from += second;
      copy(last + 2 * Tile::kBytes, from);
      copy(last + 3 * Tile::kBytes, from + apart);
    }
    copy_async_commit();
  }
};

// A lane's rows of the slab, one for every load of four matrices, relative to the slab.
template <class Tile, int kColumnTiles>
struct OperandRows {
  static constexpr bool kWide = Tile::kWide, kOne = !kWide && kColumnTiles == 1;
  static constexpr int kLoads = kWide || kOne ? kColumnTiles : kColumnTiles / 2;  // a step; kOne: a pair of steps
  uint32_t at[kLoads];
  DPA_DEVICE OperandRows(const int* columns, int num_columns, int pitch) {
    const int lane = thread() & 31;
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      int column = (kWide || kOne ? i * 8 : i * 16 + (lane >> 4) * 8) + (lane & 7);
      if (column >= num_columns) column = 0;
      at[i] = held(columns[column] + lane_part<Tile>(pitch));
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

// Some steps along K in registers, an even number.
template <class Tile, int kColumnTiles, int kSteps>
struct OperandSteps {
  using Rows = OperandRows<Tile, kColumnTiles>;
  static constexpr int kLoads = Rows::kOne ? kSteps / 2 : kSteps;  // of the slab; kOne: a load takes two steps
  struct Offsets {                                                 // in the slab; kOne: this lane's, of one of the two
    int at[kLoads];
    DPA_DEVICE explicit Offsets(const int* p) {
#pragma unroll
      for (int i = 0; i < kLoads; i++) at[i] = Rows::kOne ? p[2 * i + (thread() >> 4 & 1)] : p[i];
    }
  };
  Fragments<Tile> a[kSteps];
  uint32_t b[kLoads][Rows::kLoads][4];

  DPA_DEVICE void load_weights(uint32_t at) {
#pragma unroll
    for (int s = 0; s < kSteps; s++) a[s].load(at + s * Tile::kBytes);
  }
  DPA_DEVICE void load(const Rows& rows, const Offsets& offsets) {
#pragma unroll
    for (int s = 0; s < kLoads; s++) {
#pragma unroll
      for (int i = 0; i < Rows::kLoads; i++) load_matrix_x4(b[s][i], rows.at[i] + offsets.at[s]);
    }
  }
  DPA_DEVICE void multiply(RunSums<Tile, kColumnTiles>& sums) const {
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const Fragments<Tile>& f = a[s];
      if constexpr (Rows::kOne) {
        const uint32_t(&both)[4] = b[s / 2][0];
        sums.multiply_one(f, s & 1, both[s % 2 * 2], both[s % 2 * 2 + 1]);
      } else {
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
  constexpr int kSteps = TeamStream<Tile>::kTiles, kPairs = kSteps / 2;  // of a slot
  RunSums<Tile, kColumnTiles> sums = {sum};
  if constexpr (kColumnTiles <= (Tile::kWide ? 1 : 2)) {  // registers for two slots
    stream.refill_if_due();
    using Slot = OperandSteps<Tile, kColumnTiles, kSteps>;
    if (int whole = pairs / kPairs; whole > 0) {
      pairs -= whole * kPairs;
      Slot even, odd;
      typename Slot::Offsets ahead(offsets);
      auto load = [&](Slot& to, auto between) {
        to.load_weights(stream.wait());
        between();
        to.load(rows, ahead);
        offsets += kSteps;
        ahead = typename Slot::Offsets(offsets);
      };
      auto step = [&](const Slot& now, Slot& next) {
        load(next, [] {});
        now.multiply(sums);
        stream.refill(), stream.advance();
      };
      load(even, receive);
      stream.advance();
#pragma unroll 1
      for (; whole > 2; whole -= 2) step(even, odd), step(odd, even);
      if (whole > 1)
        step(even, odd), odd.multiply(sums);
      else
        even.multiply(sums);
      stream.due = true;
      if (Tile::kWide || pairs > 0) stream.refill_if_due();
    }
  }
#pragma unroll 1
  for (; pairs > 0; pairs -= kPairs) {
    const uint32_t at = stream.wait();
#pragma unroll 1
    for (int i = 0; i < kPairs && i < pairs; i++, offsets += 2) {
      using Pair = OperandSteps<Tile, kColumnTiles, 2>;
      Pair pair;
      pair.load_weights(at + i * 2 * Tile::kBytes);
      const typename Pair::Offsets now(offsets);
      receive();
      pair.load(rows, now);
      pair.multiply(sums);
    }
    stream.advance(), stream.refill();
  }
  sums.finish();
}

}  // namespace dpa::kernels::unet1d::device
