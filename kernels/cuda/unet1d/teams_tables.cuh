// What a block of a team makes before the loop: tables in shared memory, and every warp's list of tiles.
#pragma once
#include "kernels/cuda/unet1d/teams.h"
#include "kernels/cuda/unet1d/teams_gemm.cuh"

namespace dpa::kernels::unet1d::device {

// Barriers of some of a team's warps: of those that multiply; of the epilogue's; of all, where one kind waits for the
// other, which goes on.
DPA_DEVICE void sync_multiplying() { sync_threads(1, kThreads); }
DPA_DEVICE void sync_epilogue() { sync_threads(2, kTeamThreads - kThreads); }
DPA_DEVICE void sums_written() { arrive_threads(3, kTeamThreads); }
DPA_DEVICE void wait_for_sums() { sync_threads(3, kTeamThreads); }
DPA_DEVICE void sample_written() { arrive_threads(4, kTeamThreads); }
DPA_DEVICE void wait_for_sample() { sync_threads(4, kTeamThreads); }

// The steps' offsets behind a table of columns; they are read in twos.
template <class T>
DPA_DEVICE T* offsets_behind(T* columns, int count) {
  return columns + ((count + 1) & ~1);
}

// What a block keeps for the whole loop: the phases, tables of columns and of the steps along K, the sample, the first
// and last convolutions' weights, zeros in the slabs.
template <class Tile>
DPA_DEVICE void fill_team_tables(const TeamArguments& a, int rank, int samples, int sample0) {
  constexpr int kWords = static_cast<int>(sizeof(TeamPhase) / 4);
  uint8_t* memory = shared();
  for (int i = thread(); i < a.num_phases * kWords; i += kTeamThreads)
    reinterpret_cast<uint32_t*>(memory + a.shared.table)[i] = reinterpret_cast<const uint32_t*>(a.phases)[i];
  for (int i = thread(); i < a.slab_bytes / 16; i += kTeamThreads)
    reinterpret_cast<uint4*>(memory + a.shared.slabs)[i] = make_uint4(0, 0, 0, 0);
  sync_block();
  const TeamPhase* phases = reinterpret_cast<const TeamPhase*>(memory + a.shared.table);
  const int warp = thread() >> 5, lane = thread() & 31;
#pragma unroll 1
  for (int f = 1 + warp; f < a.num_phases; f += kTeamThreads / 32) {
    const TeamPhase& p = phases[f];
    int* columns = reinterpret_cast<int*>(memory + p.table);
    for (int i = lane; i < samples * p.columns; i += 32) {
      const int b = divide(i, p.columns), t = i - b * p.columns;
      columns[i] = (b * p.rows + t * p.time_stride) * p.pitch;
    }
    int* offsets = offsets_behind(columns, a.team_samples * p.columns);
    const int per_value = p.unit_padded >> 4, per_tap = per_value * (1 + p.joined);
#pragma unroll 1
    for (int s = 0; s < p.num_segments; s++, offsets += p.segments[0].steps)
#pragma unroll 1
      for (int i = lane; i < p.segments[s].steps; i += 32) {
        const int before = divide(i, per_tap), part = i - before * per_tap, unit = divide(before, p.segments[s].taps),
                  tap = before - unit * p.segments[s].taps, skip = part >= per_value;
        offsets[i] =
            (skip ? p.skip - p.value : 0) + tap * p.pitch + (unit * p.unit_padded + (part - skip * per_value) * 16) * 2;
      }
  }
  const int own = a.channels / kTeamBlocks, terms = a.taps * a.actions;
  float *head = reinterpret_cast<float*>(memory + a.shared.head),
        *sample = reinterpret_cast<float*>(memory + a.shared.sample);
  for (int i = thread(); i < (terms + 2 * a.actions) * own; i += kTeamThreads) {
    const int term = divide(i, own), c = rank * own + i - term * own, tail = term - terms - a.actions;
    head[i] = tail >= 0       ? a.floats[a.tail.weights + static_cast<int64_t>(tail) * a.channels + c]
              : term >= terms ? a.floats[a.head.residual + static_cast<int64_t>(term - terms) * a.channels + c]
                              : a.floats[a.head.weights + static_cast<int64_t>(term) * a.channels + c];
  }
  const int rows = a.horizon + 2 * a.halo;
  for (int i = thread(); i < samples * rows * a.actions; i += kTeamThreads) {
    const int row = divide(i, a.actions), b = divide(row, rows), time = row - b * rows - a.halo;
    const int global = ((sample0 + b) * a.horizon + time) * a.actions + i - row * a.actions;
    float x = 0.0f;
    if (time >= 0 && time < a.horizon)
      x = a.condition_mask && a.condition_mask[global] ? a.condition_data[global] : a.initial[global];
    sample[i] = x;
  }
}

// The steps of warp k of 2^log_warps along K: whole slots, but for the last.
struct TeamSteps {
  int begin, end;
};
template <class Tile>
DPA_DEVICE TeamSteps team_steps(int steps, int k, int log_warps) {
  constexpr int kTiles = TeamStream<Tile>::kTiles;
  const int slots = (steps + kTiles - 1) / kTiles, end = (slots * (k + 1) >> log_warps) * kTiles;
  return {(slots * k >> log_warps) * kTiles, end < steps ? end : steps};
}

// This warp's slots of tiles in the order in which `multiply` takes them; a lane makes those of every 32nd phase. The
// warps of the GEMMs call it.
template <class Tile>
DPA_DEVICE TeamLoads make_team_loads(const TeamArguments& a, int rank) {
  const int warp = thread() >> 5, lane = thread() & 31;
  int* counts = reinterpret_cast<int*>(shared() + a.shared.buffer) + warp * kMaxTeamPhases;
  uint32_t* loads = reinterpret_cast<uint32_t*>(shared() + a.shared.loads) + warp * a.warp_loads;
  constexpr int kTiles = TeamStream<Tile>::kTiles;
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {
#pragma unroll 1
    for (int f = lane; f < a.num_phases; f += 32) {
      const TeamPhase& p = reinterpret_cast<const TeamPhase*>(shared() + a.shared.table)[f];
      int at = 0, made = 0;
      for (int i = 0; pass && i < f; i++) at += counts[i];
      const int k = warp & ((1 << p.log_warps_k) - 1), first_tile = rank * p.channels >> 4,
                end = (rank * p.channels + p.channels + 15) >> 4;
#pragma unroll 1
      for (int s = 0; f > 0 && s < p.num_segments; s++) {
        const TeamSegment& g = p.segments[s];
        const TeamSteps mine = team_steps<Tile>(g.steps, k, p.log_warps_k);
#pragma unroll 1
        for (int r = first_tile + (warp >> p.log_warps_k); r < end; r += p.warps_rows) {
          const int slice = r / p.slice_tiles;
          const int64_t first = g.weights / Tile::kBytes + int64_t{slice} * g.steps * p.slice_tiles + r % p.slice_tiles;
#pragma unroll 1
          for (int i = mine.begin; i < mine.end; i += kTiles, made++)
            if (pass) loads[at + made] = team_load(first + i * p.slice_tiles, p.slice_tiles, i + kTiles > mine.end);
        }
      }
      if (!pass) counts[f] = made;
    }
    sync_multiplying();
  }
  TeamLoads mine = {loads, 0};
  for (int i = 0; i < a.num_phases; i++) mine.count += counts[i];
  if (mine.count == 0) {  // nothing to multiply: any tile
    if (lane == 0) loads[0] = 0;
    mine.count = 1;
  }
  sync_multiplying();
  return mine;
}

}  // namespace dpa::kernels::unet1d::device
