// What a block of the loop in phases makes before it: the table of its phases, and every warp's list of tiles.
#pragma once
#include "kernels/cuda/unet1d/phases_norm.cuh"

namespace dpa::kernels::unet1d::device {

// The table of a block's phases lies in the workspace; the entries of this phase and the next are in shared memory. A
// thread moves 16 bytes of an entry.
DPA_DEVICE uint8_t* table_of(const PhaseLoop& a) {
  return reinterpret_cast<uint8_t*>(a.runs + blocks() * kPhaseWarps * a.warp_runs) +
         block() * a.num_phases * kPhaseEntry;
}
DPA_DEVICE Work& entry(const PhaseLoop& a, int at) {
  return *reinterpret_cast<Work*>(shared() + a.shared.table + at * kPhaseEntry);
}
struct EntryPart {
  uint4 part;
  static DPA_DEVICE EntryPart load(const PhaseLoop& a, int f) {
    const uint8_t* from = table_of(a) + f * kPhaseEntry;
    return {thread() < kPhaseEntry / 16 ? reinterpret_cast<const uint4*>(from)[thread()] : make_uint4(0, 0, 0, 0)};
  }
  DPA_DEVICE void store(const PhaseLoop& a, int at) const {
    if (thread() < kPhaseEntry / 16)
      reinterpret_cast<uint4*>(shared() + a.shared.table + at * kPhaseEntry)[thread()] = part;
  }
};
// The phase after this one, and which of the two entries is its.
struct Next {
  int phase, at;
};

// The table of the phases, each with the block's first tile, made where the loop has its other data later, behind
// kPhaseCounts, and copied to the workspace.
DPA_DEVICE Work& prepared(int f) { return *reinterpret_cast<Work*>(shared() + kPhaseCounts + f * kPhaseEntry); }
template <class Tile>
DPA_DEVICE void fill_table(const PhaseLoop& a) {
  static_assert(sizeof(Phase) % 4 == 0, "the table is copied in words");
  constexpr int kWords = static_cast<int>(sizeof(Phase) / 4);
  for (int i = thread(); i < a.num_phases * kWords; i += kThreads) {
    const int f = i / kWords;
    reinterpret_cast<uint32_t*>(&prepared(f))[i - f * kWords] = reinterpret_cast<const uint32_t*>(a.phases)[i];
  }
  sync_block();
#pragma unroll 1
  for (int f = thread(); f < a.num_phases; f += kThreads)
    if (prepared(f).p.kind != PhaseKind::kSampler) prepared(f).fill_tile(block(), a.batch, kActivationBytes<Tile>);
  sync_block();
#pragma unroll 1
  for (int i = thread(); i < a.num_phases * 2 * kPhaseWarps; i += kThreads) {
    Work& w = prepared(i / (2 * kPhaseWarps));
    const int segment = i / kPhaseWarps % 2;
    if (segment < w.p.num_segments) w.fill_warp(segment, i % kPhaseWarps);
  }
  sync_block();
  for (int i = thread(); i < a.num_phases * kPhaseEntry / 16; i += kThreads)
    reinterpret_cast<uint4*>(table_of(a))[i] = reinterpret_cast<const uint4*>(shared() + kPhaseCounts)[i];
}

// The runs of this warp, in order of phase, tile, segment and row tile. A lane makes those of every 32nd phase, behind
// the lanes before it; their numbers meet in shared memory.
template <class Tile>
DPA_DEVICE Runs make_runs(const PhaseLoop& a) {
  const int warp = thread() >> 5, lane = thread() & 31;
  int* counts = reinterpret_cast<int*>(shared()) + warp * kMaxPhases;
  PhaseRun* runs = a.runs + (block() * kPhaseWarps + warp) * a.warp_runs;
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {
#pragma unroll 1
    for (int f = lane; f < a.num_phases; f += 32) {
      const Phase& p = prepared(f).p;
      int at = 0, made = 0;
      for (int i = 0; pass && i < f; i++) at += counts[i];
      const int k = warp % p.warps_k, row = warp / p.warps_k % p.warps_rows, column = warp / p.warps_k / p.warps_rows;
#pragma unroll 1
      for (int tile = block(); p.kind == PhaseKind::kConv && tile < p.tiles && column < p.warps_columns;
           tile += blocks()) {
        const int in = tile % p.slices_in, out = tile / p.slices_in % p.slices_out;
        const int unit0 = p.units * in / p.slices_in, units = p.units * (in + 1) / p.slices_in - unit0;
        const int last = p.row_tiles * (out + 1) / p.slices_out;
#pragma unroll 1
        for (int s = 0; s < p.num_segments; s++) {
          const int per_unit = (1 + p.joined) * p.segments[s].taps * (p.unit_padded / 16), steps = units * per_unit;
          const int begin = steps * k / p.warps_k, count = steps * (k + 1) / p.warps_k - begin;
#pragma unroll 1
          for (int r = p.row_tiles * out / p.slices_out + row; r < last && count > 0; r += p.warps_rows, made++) {
            if (!pass) continue;
            const int slice = r / p.slice_tiles;
            const int64_t first = ((static_cast<int64_t>(slice) * p.units + unit0) * per_unit + begin) * p.slice_tiles +
                                  r % p.slice_tiles;
            runs[at + made] = {static_cast<uint32_t>((p.segments[s].weights + first * Tile::kBytes) / 16),
                               static_cast<uint32_t>(count | p.slice_tiles << 16)};
          }
        }
      }
      if (!pass) counts[f] = made;
    }
    sync_block();
  }
  Runs mine = {runs, 0};
  for (int i = 0; i < a.num_phases; i++) mine.count += counts[i];
  sync_block();
  return mine;
}

}  // namespace dpa::kernels::unet1d::device
