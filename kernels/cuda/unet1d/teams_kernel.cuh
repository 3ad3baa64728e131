// The loop of one block of a team: all phases of all steps, by warps that multiply and warps of the epilogue. A phase of
// the first: what does not need the input, the input, the GEMM, sums to shared memory; the next phase's input tells that
// those have been read.
#pragma once
#include "kernels/cuda/unet1d/teams_epilogue.cuh"

namespace dpa::kernels::unet1d::device {

template <class Tile, template <class> class Handover>
struct TeamGemm : TeamBlock<Tile, Handover> {
  using Base = TeamBlock<Tile, Handover>;
  using Base::a, Base::handover, Base::watch, Base::rank, Base::samples, Base::step, Base::phase, Base::flag, Base::of,
      Base::mark;
  TeamStream<Tile>& stream;

  template <class T>
  DPA_DEVICE T* at(int offset) const {
    return Base::template at<T>(offset);
  }
  // Bytes that a block receives behind phase f.
  DPA_DEVICE int bytes_behind(int f) const {
    if (f >= a.num_phases) f -= a.num_phases;
    if (f + 1 == a.num_phases) return kTeamBlocks * samples * a.horizon * a.actions * 4;
    return samples * of(f).times * of(f).channels * kTeamBlocks * kActivationBytes<Tile>;
  }

  // The head: the convolution of the sample and its 1x1 residual; a warp takes every eighth term.
  DPA_DEVICE void convolve_sample(const TeamPhase& p) const {
    const int warp = thread() >> 5, lane = thread() & 31, own = p.channels, quads = own / 4;
    const int pitch = p.row_tiles * 16 + 4, columns = samples * p.columns, actions = a.actions;
    const float *weights = at<float>(a.shared.head), *sample = at<float>(a.shared.sample);
#pragma unroll 1
    for (int s = 0; s < 2; s++) {
      const int terms = p.segments[s].taps * actions;
      const float* from = weights + (s ? p.segments[0].taps * actions * own : 0);
      float* to = at<float>(a.shared.sums) + s * a.sum_segment + warp * columns * pitch;
#pragma unroll 1
      for (int i = lane; i < columns * quads; i += 32) {
        const int column = divide(i, quads), q = i - column * quads, b = divide(column, p.columns),
                  t = column - b * p.columns;
        const float* x = sample + (b * (a.horizon + 2 * a.halo) + t + a.halo - p.segments[s].taps / 2) * actions;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (a.local && s == 1 && warp == 0)
          sum = four(a.local + step * a.local_step + (Base::sample0 + b) * a.local_sample + t * own * kTeamBlocks +
                     rank * own + q * 4);
#pragma unroll 4
        for (int term = warp; term < terms; term += kPhaseWarps) {
          const float4 w = four(from + term * own + q * 4);
          const float y = x[term];
          sum.x += y * w.x, sum.y += y * w.y, sum.z += y * w.z, sum.w += y * w.w;
        }
        *reinterpret_cast<float4*>(to + column * pitch + q * 4) = sum;
      }
    }
  }

  // A warp's part of a segment: its steps along K, and where tap 0 reads.
  struct Share {
    int begin, pairs;
    uint32_t slab;
  };
  DPA_DEVICE Share share_of(const TeamPhase& p, int segment, int k) const {
    const TeamSegment& g = p.segments[segment];
    const TeamSteps mine = team_steps<Tile>(g.steps, k, p.log_warps_k);
    return {mine.begin, (mine.end - mine.begin) / 2, shared_address(shared()) + p.value + (g.first + a.halo) * p.pitch};
  }
  // Receives the input behind phase f - 1 and multiplies it.
  template <int kColumnTiles>
  DPA_DEVICE void multiply(const TeamPhase& p, int f) {
    const int warp = thread() >> 5, lane = thread() & 31, k = warp & ((1 << p.log_warps_k) - 1);
    const int count = samples * p.columns, pitch = p.row_tiles * 16 + 4, segments = p.num_segments,
              first_row = warp >> p.log_warps_k, rows_apart = p.warps_rows, row_tiles = Base::row_tiles_of(p);
    const int *columns = at<int>(p.table), *offsets = offsets_behind(columns, a.team_samples * p.columns);
    OperandRows<Tile, kColumnTiles> rows(columns, count, p.pitch);
    Share share = share_of(p, 0, k);
    float* to = at<float>(a.shared.sums) + (k * count + (lane & 3) * 2) * pitch + (lane >> 2);
    const int left = held(count - (lane & 3) * 2), next = bytes_behind(f + 1);
    bool waiting = true;
    auto received = [&] {
      if (waiting) receive(f - 1, next), mark(2), waiting = false;
    };
    mark(1);
#pragma unroll 1
    for (int s = 0; s < segments; s++, to += a.sum_segment) {
#pragma unroll 1
      for (int row = first_row; row < row_tiles; row += rows_apart) {
        float sum[kColumnTiles][4] = {};
        if (share.pairs > 0)
          multiply_run(stream, offsets + share.begin, share.pairs, rows.from(share.slab), sum, received);
        received();  // of a warp without steps: until then the epilogue may read the sums before these
#pragma unroll
        for (int i = 0; i < kColumnTiles; i++) {
#pragma unroll
          for (int e = 0; e < 4; e++)
            if (i * 8 + (e & 1) < left) to[(i * 8 + (e & 1)) * pitch + row * 16 + (e >> 1) * 8] = sum[i][e];
        }
      }
      offsets += p.segments[s].steps;
      if (s + 1 < segments) share = share_of(p, 1, k);
    }
    received();  // of a warp without rows
  }

  DPA_DEVICE void run_phase(int f) {
    phase = f;
    mark(0);
    const TeamPhase& p = of(f);
    if (f == 0) {
      mark(1), mark(2);
      convolve_sample(p);
    } else {
      switch (p.column_tiles) {
        case 1: multiply<1>(p, f); break;
        case 2: multiply<2>(p, f); break;
        case 4: multiply<4>(p, f); break;
        default: multiply<8>(p, f);
      }
    }
    mark(3);
    sums_written();
    stream.refill_if_due();
  }
  // `next`: bytes behind the phase after the next.
  DPA_DEVICE void receive(int f, int next) {
    if constexpr (Handover<Tile>::kWords) {
      const TeamPhase& p = of(f);
      handover.receive(p, {p.out, p.out_pitch, p.out_rows, p.out_padded, a.halo}, samples, flag, watch);
      sync_multiplying();
    } else {
      handover.wait(), handover.expect_next(next);
    }
  }

  DPA_DEVICE void run() {
    if constexpr (!Handover<Tile>::kWords) {
      if (thread() == 0) handover.expect(0, bytes_behind(0)), handover.expect(1, bytes_behind(1));
    }
#pragma unroll 1
    for (step = 0; step < a.steps; step++) {
      flag = (step + 1) & 1;
#pragma unroll 1
      for (int f = 0; f < a.num_phases; f++) run_phase(f);
      if constexpr (!Handover<Tile>::kWords) handover.wait(), handover.expect_next(bytes_behind(a.num_phases + 1));
      wait_for_sample();
    }
  }
};

template <class Tile, template <class> class Handover>
DPA_DEVICE void run_team(const TeamArguments& a) {
  const int team = block() / kTeamBlocks, rank = block() % kTeamBlocks, sample0 = team * a.team_samples;
  const int samples = a.batch - sample0 < a.team_samples ? a.batch - sample0 : a.team_samples;
  Handover<Tile> handover(a, team);
  fill_team_tables<Tile>(a, rank, samples, sample0);
  sync_block();
  handover.meet();
  if (thread() < kThreads) {
    TeamStream<Tile> stream(a.weights, make_team_loads<Tile>(a, rank), a.shared.buffer, a.slots);
    TeamGemm<Tile, Handover> gemm = {{a, handover, {a.workspace}, rank, samples, sample0}, stream};
    gemm.run();
    copy_async_wait<0>();
  } else {
    TeamEpilogue<Tile, Handover> epilogue = {{a, handover, {a.workspace}, rank, samples, sample0}};
    epilogue.run();
  }
  handover.meet();  // nobody leaves while a peer may store into its memory
}

}  // namespace dpa::kernels::unet1d::device
