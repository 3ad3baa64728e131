// The epilogue of a team's block, by warps of its own: from the sums of the warps along K to the values that the team
// receives. While the other warps multiply, they fetch what the phase needs.
#pragma once
#include "kernels/cuda/unet1d/teams_handover.cuh"
#include "kernels/cuda/unet1d/teams_tables.cuh"

namespace dpa::kernels::unet1d::device {

DPA_DEVICE float4 four(const float* p) { return *reinterpret_cast<const float4*>(p); }
DPA_DEVICE void read_four(float (&to)[4], const float* p) {
  const float4 v = four(p);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// What both kinds of a block's warps know.
template <class Tile, template <class> class Handover>
struct TeamBlock {
  const TeamArguments& a;
  Handover<Tile> handover;
  Watch watch;
  int rank, samples, sample0;
  int step = 0, phase = 0;
  uint32_t flag = 1;

  template <class T>
  DPA_DEVICE T* at(int offset) const {
    return reinterpret_cast<T*>(shared() + offset);
  }
  DPA_DEVICE const TeamPhase& of(int f) const { return at<TeamPhase>(a.shared.table)[f]; }
  DPA_DEVICE void mark(int what) const {
#ifdef DPA_TEST_MARKS
    if (a.marks && step + 1 == a.steps && (thread() == 0 || thread() == kThreads))
      a.marks[(block() * a.num_phases + phase) * kTeamMarks + what] = clock_now();
#else
    (void)what;
#endif
  }
  // The first of a block's channels in its first row tile; and those tiles.
  DPA_DEVICE int first_row_of(const TeamPhase& p) const { return rank * p.channels & 15; }
  DPA_DEVICE int row_tiles_of(const TeamPhase& p) const { return (first_row_of(p) + p.channels + 15) >> 4; }
};

// A thread's part of a phase's epilogue: four channels of a (sample, group) pair, at times t, t + pass_times, ...
// What it needs behind the GEMM is made before the input is waited for.
struct Part {
  int items;                  // of this thread
  int sample, time, channel;  // of the first item; channel: of the block
  int counted;                // of the four channels, by the norm; the others are zero
  uint32_t sums;              // where the first item's sums of the first warp are; bytes to the next item's and
  uint32_t item, share;       // to the next warp's along K
  uint32_t out, out_time;     // where its values go, and from a time to the next
};

// Parameters of four channels, fetched before the input is waited for.
struct PartParameters {
  float bias[2][4] = {}, gamma[4] = {}, beta[4] = {}, film[2][4] = {};
};

template <class Tile, template <class> class Handover>
struct TeamEpilogue : TeamBlock<Tile, Handover> {
  using Base = TeamBlock<Tile, Handover>;
  using Base::a, Base::handover, Base::watch, Base::rank, Base::samples, Base::sample0, Base::step, Base::phase,
      Base::flag, Base::of, Base::mark;
  float residual[kTeamPasses][4] = {}, other[kTeamPasses][4] = {};  // of this round's pair, of the other one's

  template <class T>
  DPA_DEVICE T* at(int offset) const {
    return Base::template at<T>(offset);
  }
  DPA_DEVICE Part part_of(const TeamPhase& p, int first_row, int round) const {
    const int mine = thread() - kThreads, first_pair = mine >> (p.log_pair_warps + 5),
              pair = first_pair + round * kTeamEpilogueWarps, index = mine - (first_pair << (p.log_pair_warps + 5));
    const int row = p.quads == 1 ? index : static_cast<int>(high_product(index, p.quads_magic));
    const int sample = p.groups == 1 ? pair : static_cast<int>(divide(pair, p.groups)),
              group = pair - sample * p.groups;
    const int of_group = (index - row * p.quads) * 4, channel = group * p.quads * 4 + of_group,
              pitch = p.row_tiles * 16 + 4;
    const bool active = sample < samples && row < p.pass_times;
    const SlabAt to = {p.out, p.out_pitch, p.out_rows, p.out_padded, a.halo};
    Part part = {};
    part.items = held(active ? (row < p.columns) + (row + p.pass_times < p.columns) : 0);
    part.sample = sample, part.time = row, part.channel = channel;
    const int counted = p.counted - of_group;
    part.counted = held(counted < 0 ? 0 : counted < 4 ? counted : 4);
    part.item = held(p.pass_times * pitch * 4), part.share = held(samples * p.columns * pitch * 4);
    const int place = part.items ? (sample * p.columns + row) * pitch + channel : 0;
    part.sums = held(shared_address(shared()) + a.shared.sums + (place + first_row) * 4);
    part.out = held(handover.place(p, to, sample, row << p.upsample, rank, channel));
    part.out_time = held(handover.pitch(p));
    return part;
  }
  DPA_DEVICE void fetch(const TeamPhase& p, const Part& part, PartParameters& f) const {
    if (!part.items) return;
    const int channel = rank * p.channels + part.channel, channels = p.channels * kTeamBlocks;
#pragma unroll
    for (int s = 0; s < 2; s++) {
      if (s >= p.num_segments) break;
      read_four(f.bias[s], a.floats + p.segments[s].bias + channel);
    }
    if (p.norm >= 0)
      read_four(f.gamma, a.floats + p.norm + channel), read_four(f.beta, a.floats + p.norm + channels + channel);
    if (p.film < 0) return;
    const int sample = sample0 + part.sample, first = p.film + channel, shift = a.film_scale ? first + channels : first;
    const float* row = a.film_step + step * a.film_step_stride + sample * a.film_sample_stride;
    auto take = [&](float(&to)[4], int first) {
      read_four(to, row + first);
      if (!a.film_cond) return;
      float more[4];
      read_four(more, a.film_cond + static_cast<int64_t>(sample) * a.film_rows + first);
#pragma unroll
      for (int i = 0; i < 4; i++) to[i] += more[i];
    };
    take(f.film[1], shift);
#pragma unroll
    for (int i = 0; i < 4; i++) f.film[0][i] = 1.0f;
    if (a.film_scale) take(f.film[0], first);
  }

  // The sums of this thread's items over kParts warps along K. What a thread has no item for is read, and not used.
  template <int kItems, int kParts>
  DPA_DEVICE static void sum_parts(const Part& part, uint32_t from, float (&v)[kTeamPasses][4]) {
#pragma unroll
    for (int j = 0; j < kItems; j++) {
      float4 x[kParts];
#pragma unroll
      for (int k = 0; k < kParts; k++) x[k] = load_shared(from + j * part.item + k * part.share);
      float4 sum = x[0];
#pragma unroll
      for (int k = 1; k < kParts; k++) sum.x += x[k].x, sum.y += x[k].y, sum.z += x[k].z, sum.w += x[k].w;
      v[j][0] = sum.x, v[j][1] = sum.y, v[j][2] = sum.z, v[j][3] = sum.w;
    }
  }
  // The same of a segment, with the bias.
  template <int kItems>
  DPA_DEVICE void add_up(const Part& part, int segment, int parts, const PartParameters& f,
                         float (&v)[kTeamPasses][4]) const {
    const uint32_t from = part.sums + segment * a.sum_segment * 4;
    switch (parts) {
      case 8: sum_parts<kItems, 8>(part, from, v); break;
      case 4: sum_parts<kItems, 4>(part, from, v); break;
      case 2: sum_parts<kItems, 2>(part, from, v); break;
      default: sum_parts<kItems, 1>(part, from, v);
    }
#pragma unroll
    for (int j = 0; j < kItems; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        v[j][i] = j < part.items ? v[j][i] + (segment ? f.bias[1][i] : f.bias[0][i]) : 0.0f;
      }
    }
  }

  // Mean and 1 / deviation of a pair's values, in float32 around a warp's first one, so that nothing cancels. With
  // several warps a pair, every thread of the epilogue calls it. Zeros that are not counted add nothing to sums around 0.
  template <int kItems>
  DPA_DEVICE float2 moments(const Part& part, int log_pair_warps, float inverse_count,
                            const float (&v)[kTeamPasses][4]) const {
    const float first = Tile::kWide ? shuffle_first(v[0][0]) : 0.0f;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kItems; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float d = j < part.items && (!Tile::kWide || i < part.counted) ? v[j][i] - first : 0.0f;
        sum += d, squares += d * d;
      }
    }
#pragma unroll
    for (int m = 16; m; m >>= 1) sum += shuffle_xor(sum, m), squares += shuffle_xor(squares, m);
    float mean = first + sum * inverse_count, variance = (squares - sum * sum * inverse_count) * inverse_count;
    if (log_pair_warps > 0) {
      float count = static_cast<float>(part.items * part.counted);
#pragma unroll
      for (int m = 16; m; m >>= 1) count += shuffle_xor(count, m);
      const float inverse = count > 0.0f ? quotient(1.0f, count) : 0.0f;
      float4* shares = at<float4>(a.shared.statistics);
      const int warp = (thread() - kThreads) >> 5, warps = 1 << log_pair_warps, base = warp & ~(warps - 1);
      if ((thread() & 31) == 0)
        shares[warp] = make_float4(first + sum * inverse, squares - sum * sum * inverse, count, 0.0f);
      sync_epilogue();
      mean = 0.0f, variance = 0.0f;
#pragma unroll
      for (int k = 0; k < kTeamEpilogueWarps; k++)
        if (k < warps) mean += shares[base + k].x * shares[base + k].z;
      mean *= inverse_count;
#pragma unroll
      for (int k = 0; k < kTeamEpilogueWarps; k++) {
        if (k >= warps) continue;
        const float4 s = shares[base + k];
        variance += s.y + s.z * (s.x - mean) * (s.x - mean);
      }
      variance *= inverse_count;
    }
    return make_float2(mean, inverse_root((variance > 0.0f ? variance : 0.0f) + 1e-5f));
  }

  // What a phase's epilogue does, read before the input is waited for.
  struct Todo {
    int parts, log_pair_warps, pass_times, times, channels;
    float inverse_count;
    bool norm, film, add, keep, upsample, residual, last;
  };
  DPA_DEVICE Todo todo_of(const TeamPhase& p, bool head, bool last) const {
    const int flags = held((p.norm >= 0) | (p.film >= 0) << 1 | p.add << 2 | p.keep << 3 | p.upsample << 4 |
                           (p.num_segments == 2 && !p.upsample) << 5);
    return {static_cast<int>(held(head ? kPhaseWarps : 1 << p.log_warps_k)),
            static_cast<int>(held(p.log_pair_warps)),
            p.pass_times,
            p.times,
            p.channels,
            as_float(held(bits(p.inverse_count))),
            (flags & 1) != 0,
            (flags & 2) != 0,
            (flags & 4) != 0,
            (flags & 8) != 0,
            (flags & 16) != 0,
            (flags & 32) != 0,
            last};
  }
  template <int kItems>
  DPA_DEVICE void epilogue(const Part& part, const PartParameters& f, const Todo& todo) {
#pragma unroll 1
    for (int s = 0; s < 1 + todo.upsample; s++) {
      float v[kTeamPasses][4];
      add_up<kItems>(part, s, todo.parts, f, v);
      // Before the values are sent: with them the warps of the GEMM may go on and overwrite the sums.
      if (todo.residual) add_up<kItems>(part, 1, todo.parts, f, residual);
      mark(5);
      if (todo.norm) {
        const float2 moment = moments<kItems>(part, todo.log_pair_warps, todo.inverse_count, v);
        mark(6);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float factor = moment.y * f.gamma[i], term = f.beta[i] - moment.x * factor;
#pragma unroll
          for (int j = 0; j < kItems; j++) v[j][i] = activated<Tile::kWide>(v[j][i] * factor + term, a.steepness);
        }
      }
      if (todo.film) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
          for (int j = 0; j < kItems; j++) v[j][i] = v[j][i] * f.film[0][i] + f.film[1][i];
        }
      }
#pragma unroll
      for (int j = 0; j < kItems; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (todo.add) v[j][i] += residual[j][i];
          if (todo.keep) residual[j][i] = v[j][i];
        }
        if (j >= part.items) continue;
        if (todo.last)
          *at<float4>(a.shared.tail_values +
                      static_cast<int>(held(part.time + j * todo.pass_times)) * (todo.channels + 4) * 4 +
                      (part.sample * todo.times * (todo.channels + 4) + part.channel) * 4) =
              make_float4(v[j][0], v[j][1], v[j][2], v[j][3]);
        else
          handover.send(part.out + ((j * todo.pass_times << todo.upsample) + s) * part.out_time, part.out_time, flag,
                        v[j]);
      }
    }
  }

  DPA_DEVICE void swap_residuals() {
#pragma unroll
    for (int j = 0; j < kTeamPasses; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float x = residual[j][i];
        residual[j][i] = other[j][i], other[j][i] = x;
      }
    }
  }
  DPA_DEVICE void run_phase(int f) {
    phase = f;
    const TeamPhase& p = of(f);
    const bool last = f + 1 == a.num_phases;
    const int first_row = f == 0 ? 0 : Base::first_row_of(p), warp = (thread() - kThreads) >> 5;
    Part part = part_of(p, first_row, 0);
    const Todo todo = todo_of(p, f == 0, last);
    PartParameters parameters;
    fetch(p, part, parameters);
    // Several warps a pair meet at a barrier; or a warp has several pairs, one after another.
    const int passes = p.passes, pairs = p.log_pair_warps > 0 ? kTeamEpilogueWarps : samples * p.groups;
    wait_for_sums();
    mark(4);
#pragma unroll 1
    for (int round = 0; round * kTeamEpilogueWarps < pairs; round++) {
      if (round > 0) {
        part = part_of(p, first_row, round), parameters = {};
        fetch(p, part, parameters);
      }
      if (round * kTeamEpilogueWarps + warp < pairs) {
        if (passes == 1)
          epilogue<1>(part, parameters, todo);
        else
          epilogue<kTeamPasses>(part, parameters, todo);
      }
      if (pairs > kTeamEpilogueWarps) swap_residuals();
    }
    if (!last) handover.sent();
    mark(7);
  }
  // The 1x1 convolution to the actions, of the block's channels; then, in every block, the scheduler's step.
  DPA_DEVICE void tail() {
    const int own = of(0).channels, count = samples * a.horizon * a.actions, per_sample = a.horizon * a.actions;
    const float *values = at<float>(a.shared.tail_values),
                *weights = at<float>(a.shared.head) + (a.taps + 1) * a.actions * own;
    const int mine = thread() - kThreads;
    constexpr int kApart = kTeamThreads - kThreads;
    sync_epilogue();
    for (int i = mine; i < count; i += kApart) {
      const int row = divide(i, a.actions), action = i - row * a.actions;
      float sum = 0.0f;
#pragma unroll 4
      for (int c = 0; c < own; c += 4) {
        const float4 x = four(values + row * (own + 4) + c), w = four(weights + action * own + c);
        sum += x.x * w.x + x.y * w.y + x.z * w.z + x.w * w.w;
      }
      handover.send_tail(a, rank * count + i, flag, sum);
    }
    if constexpr (Handover<Tile>::kWords) {
      handover.receive_tail(a, kTeamBlocks * count, flag, watch);
      sync_epilogue();
    } else {
      handover.wait();
    }
    const float* sums = at<float>(a.shared.tail_words);
    for (int i = mine; i < count; i += kApart) {
      const int b = divide(i, per_sample), action = i - divide(i, a.actions) * a.actions;
      float* x = at<float>(a.shared.sample) + i + (2 * b + 1) * a.halo * a.actions;
      const int global = sample0 * per_sample + i;
      float output = a.floats[a.tail.bias + action];
#pragma unroll
      for (int k = 0; k < kTeamBlocks; k++) output += sums[k * count + i];
      float made = output;
      if (a.table) {
        const float* r = a.table + step * 6;
        float x0 = r[0] * *x + r[1] * output;
        x0 = x0 < -a.clip ? -a.clip : x0 > a.clip ? a.clip : x0;
        made = r[2] * x0 + r[3] * *x + r[4] * output;
        if (a.noise) made += r[5] * a.noise[step * a.noise_stride + global];
        if (a.condition_mask && a.condition_mask[global]) made = a.condition_data[global];
      }
      *x = made;
      if (step + 1 == a.steps && rank == 0) a.output[global] = made;
    }
    sample_written();
  }

  DPA_DEVICE void run() {
#pragma unroll 1
    for (step = 0; step < a.steps; step++) {
      flag = (step + 1) & 1;
#pragma unroll 1
      for (int f = 0; f < a.num_phases; f++) run_phase(f);
      tail();
    }
  }
};

}  // namespace dpa::kernels::unet1d::device
