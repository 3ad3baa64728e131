// The loop of one block of a team: all phases of all steps.
#pragma once
#include "kernels/cuda/unet1d/teams_handover.cuh"
#include "kernels/cuda/unet1d/teams_tables.cuh"

namespace dpa::kernels::unet1d::device {

DPA_DEVICE float4 four(const float* p) { return *reinterpret_cast<const float4*>(p); }
DPA_DEVICE void read_four(float (&to)[4], const float* p) {
  const float4 v = four(p);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// A thread's part of a phase's epilogue: four channels of a (sample, group) pair, at times t, t + pass_times, ...
// What it needs behind the GEMM is made before the input is waited for.
struct Part {
  int items;                  // of this thread
  int sample, time, channel;  // of the first item; channel: of the block
  uint32_t sums;              // where the first item's sums of the first warp are; bytes to the next item's and
  uint32_t item, share;       // to the next warp's along K
  uint32_t out, out_time;     // where its values go, and from a time to the next
};

// Parameters of four channels, fetched before the input is waited for.
struct PartParameters {
  float bias[2][4] = {}, scale[2][4] = {}, gamma[4] = {}, beta[4] = {}, film[2][4] = {}, more[2][4] = {};
};

template <class Tile, template <class> class Handover>
struct TeamLoop {
  const TeamArguments& a;
  TeamStream<Tile>& stream;
  Handover<Tile> handover;
  Watch watch;
  int rank, samples, sample0;
  int step = 0, phase = 0;
  uint32_t flag = 1;
  float residual[kTeamPasses][4] = {};

  template <class T>
  DPA_DEVICE T* at(int offset) const {
    return reinterpret_cast<T*>(shared() + offset);
  }
  DPA_DEVICE const TeamPhase& of(int f) const { return at<TeamPhase>(a.shared.table)[f]; }
  DPA_DEVICE void mark(int what) const {
#ifdef DPA_TEST_MARKS
    if (a.marks && step + 1 == a.steps && thread() == 0)
      a.marks[(block() * a.num_phases + phase) * kTeamMarks + what] = clock_now();
#else
    (void)what;
#endif
  }
  // Bytes that a block receives behind phase f.
  DPA_DEVICE int bytes_behind(int f) const {
    if (f >= a.num_phases) f -= a.num_phases;
    if (f + 1 == a.num_phases) return kTeamBlocks * samples * a.horizon * a.actions * 4;
    return samples * of(f).times * of(f).channels * kTeamBlocks * (Tile::kWide ? 4 : 2);
  }

  DPA_DEVICE Part part_of(const TeamPhase& p, int first_row) const {
    const int warp = thread() >> 5, pair = warp >> p.log_pair_warps;
    const int index = thread() - (pair << (p.log_pair_warps + 5));
    const int row = p.quads == 1 ? index : static_cast<int>(high_product(index, p.quads_magic));
    const int sample = p.groups == 1 ? pair : static_cast<int>(divide(pair, p.groups)),
              group = pair - sample * p.groups;
    const int channel = (group * p.quads + index - row * p.quads) * 4, pitch = p.row_tiles * 16 + 4;
    const bool active = sample < samples && row < p.pass_times;
    const SlabAt to = {p.out, p.out_pitch, p.out_rows, p.out_padded, a.halo};
    Part part = {};
    part.items = held(active ? (row < p.columns) + (row + p.pass_times < p.columns) : 0);
    part.sample = sample, part.time = row, part.channel = channel;
    part.item = held(p.pass_times * pitch * 4), part.share = held(samples * p.columns * pitch * 4);
    part.sums =
        held(shared_address(shared()) + a.shared.sums + ((sample * p.columns + row) * pitch + first_row + channel) * 4);
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
      if constexpr (Tile::kScaled) {
#pragma unroll
        for (int i = 0; i < 4; i++) f.scale[s][i] = 1.0f / Weights<Tile>::kScale;
        if (p.segments[s].scale < 0) continue;
        read_four(f.scale[s], a.floats + p.segments[s].scale + channel);
      }
    }
    if (p.norm >= 0)
      read_four(f.gamma, a.floats + p.norm + channel), read_four(f.beta, a.floats + p.norm + channels + channel);
    if (p.film < 0) return;
    const int sample = sample0 + part.sample, first = p.film + channel, shift = a.film_scale ? first + channels : first;
    const float* row = a.film_step + step * a.film_step_stride + sample * a.film_sample_stride;
    read_four(f.film[1], row + shift);
    if (a.film_scale) read_four(f.film[0], row + first);
    if (a.film_cond) {
      const float* more = a.film_cond + static_cast<int64_t>(sample) * a.film_rows;
      read_four(f.more[1], more + shift);
      if (a.film_scale) read_four(f.more[0], more + first);
    }
  }

  // The sums of this thread's items over the warps along K, of a segment.
  DPA_DEVICE void add_up(const Part& part, int segment, int parts, const PartParameters& f,
                         float (&v)[kTeamPasses][4]) const {
#pragma unroll
    for (int j = 0; j < kTeamPasses; j++) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (j < part.items) {
        uint32_t from = part.sums + segment * a.sum_segment * 4 + j * part.item;
        float4 x[kPhaseWarps];
#pragma unroll
        for (int k = 0; k < kPhaseWarps; k++, from += part.share) {
          x[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (k < parts) x[k] = load_shared_4(from);
        }
#pragma unroll
        for (int k = 0; k < kPhaseWarps; k++) sum.x += x[k].x, sum.y += x[k].y, sum.z += x[k].z, sum.w += x[k].w;
      }
      v[j][0] = sum.x, v[j][1] = sum.y, v[j][2] = sum.z, v[j][3] = sum.w;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if constexpr (Tile::kScaled) v[j][i] *= Weights<Tile>::kScale * (segment ? f.scale[1][i] : f.scale[0][i]);
        v[j][i] += segment ? f.bias[1][i] : f.bias[0][i];
      }
    }
  }

  // Mean and 1 / deviation of a pair's values. With several warps a pair, every thread of the block calls it.
  DPA_DEVICE float2 moments(const Part& part, int log_pair_warps, float inverse_count,
                            const float (&v)[kTeamPasses][4]) const {
    const float first = shuffle_first(v[0][0]);
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kTeamPasses; j++) {
      if (j >= part.items) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float d = v[j][i] - first;
        sum += d, squares += d * d;
      }
    }
#pragma unroll
    for (int m = 16; m; m >>= 1) sum += shuffle_xor(sum, m), squares += shuffle_xor(squares, m);
    float mean = first + sum * inverse_count, variance = (squares - sum * sum * inverse_count) * inverse_count;
    if (log_pair_warps > 0) {
      float count = 4.0f * static_cast<float>(part.items);
#pragma unroll
      for (int m = 16; m; m >>= 1) count += shuffle_xor(count, m);
      const float inverse = count > 0.0f ? quotient(1.0f, count) : 0.0f;
      float4* shares = at<float4>(a.shared.statistics);
      const int warp = thread() >> 5, warps = 1 << log_pair_warps, base = warp & ~(warps - 1);
      if ((thread() & 31) == 0)
        shares[warp] = make_float4(first + sum * inverse, squares - sum * sum * inverse, count, 0.0f);
      sync_block();
      mean = 0.0f, variance = 0.0f;
#pragma unroll
      for (int k = 0; k < kPhaseWarps; k++)
        if (k < warps) mean += shares[base + k].x * shares[base + k].z;
      mean *= inverse_count;
#pragma unroll
      for (int k = 0; k < kPhaseWarps; k++) {
        if (k >= warps) continue;
        const float4 s = shares[base + k];
        variance += s.y + s.z * (s.x - mean) * (s.x - mean);
      }
      variance *= inverse_count;
    }
    return make_float2(mean, inverse_root((variance > 0.0f ? variance : 0.0f) + 1e-5f));
  }

  // From the warps' sums to the values that the team receives; `last`: to the block's own input of the tail.
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
  DPA_DEVICE void epilogue(const Part& part, const PartParameters& f, const Todo& todo) {
#pragma unroll 1
    for (int s = 0; s < 1 + todo.upsample; s++) {
      float v[kTeamPasses][4];
      add_up(part, s, todo.parts, f, v);
      // Before the values are sent: with them the block's other warps may go on and overwrite the sums.
      if (todo.residual) add_up(part, 1, todo.parts, f, residual);
      mark(5);
      if (todo.norm) {
        const float2 moment = moments(part, todo.log_pair_warps, todo.inverse_count, v);
        mark(6);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float factor = moment.y * f.gamma[i], term = f.beta[i] - moment.x * factor;
#pragma unroll
          for (int j = 0; j < kTeamPasses; j++) v[j][i] = mish_of<Tile::kWide>(v[j][i] * factor + term);
        }
      }
      if (todo.film) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float scale = a.film_scale ? f.film[0][i] + f.more[0][i] : 1.0f, shift = f.film[1][i] + f.more[1][i];
#pragma unroll
          for (int j = 0; j < kTeamPasses; j++) v[j][i] = v[j][i] * scale + shift;
        }
      }
#pragma unroll
      for (int j = 0; j < kTeamPasses; j++) {
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
          handover.send(part.out + ((j * todo.pass_times << todo.upsample) + s) * part.out_time, flag, v[j]);
      }
    }
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
    int begin, steps;
    uint32_t slab;
  };
  DPA_DEVICE Share share_of(const TeamPhase& p, int segment, int k) const {
    const TeamSegment& g = p.segments[segment];
    const int begin = g.steps * k >> p.log_warps_k;
    return {begin, (g.steps * (k + 1) >> p.log_warps_k) - begin,
            shared_address(shared()) + p.value + (g.first + a.halo) * p.pitch};
  }
  // Receives the input behind phase f - 1 and multiplies it.
  template <int kColumnTiles>
  DPA_DEVICE void multiply(const TeamPhase& p, int f, int row_tiles) {
    const int warp = thread() >> 5, lane = thread() & 31, k = warp & ((1 << p.log_warps_k) - 1);
    const int count = samples * p.columns, pitch = p.row_tiles * 16 + 4, segments = p.num_segments,
              first_row = warp >> p.log_warps_k, rows_apart = p.warps_rows, rounds = p.rounds;
    const int *columns = at<int>(p.table), *offsets = columns + a.team_samples * p.columns;
    OperandRows<Tile, kColumnTiles> rows(columns, count);
    Share share = share_of(p, 0, k);
    float* to = at<float>(a.shared.sums) + (k * count + (lane & 3) * 2) * pitch + (lane >> 2);
    bool waiting = true;
    auto received = [&] {
      if (waiting) receive(f - 1), mark(2), waiting = false;
    };
#pragma unroll 1
    for (int s = 0; s < segments; s++, to += a.sum_segment) {
      int row = first_row;
#pragma unroll 1
      for (int round = 0; round < rounds; round++, row += rows_apart) {
        if (row >= row_tiles) break;
        float sum[kColumnTiles][4] = {};
        if (share.steps > 0)
          multiply_run(stream, offsets + share.begin, share.steps, rows.from(share.slab), sum, received);
#pragma unroll
        for (int i = 0; i < kColumnTiles; i++) {
#pragma unroll
          for (int e = 0; e < 4; e++)
            if (i * 8 + (lane & 3) * 2 + (e & 1) < count)
              to[(i * 8 + (e & 1)) * pitch + row * 16 + (e >> 1) * 8] = sum[i][e];
        }
      }
      offsets += p.segments[s].steps;
      if (s + 1 < segments) share = share_of(p, 1, k);
    }
    received();  // of a warp without steps
  }

  DPA_DEVICE void run_phase(int f) {
    phase = f;
    mark(0);
    const TeamPhase& p = of(f);
    const bool last = f + 1 == a.num_phases;
    const int first_channel = rank * p.channels, first_tile = first_channel >> 4,
              row_tiles = ((first_channel + p.channels + 15) >> 4) - first_tile;
    const Part part = part_of(p, f == 0 ? 0 : first_channel - first_tile * 16);
    const Todo todo = todo_of(p, f == 0, last);
    PartParameters parameters;
    fetch(p, part, parameters);
    // several warps a pair meet at a barrier of the block
    const bool works = p.log_pair_warps > 0 || (thread() >> 5) < samples * p.groups;
    mark(1);
    if (f == 0) {
      mark(2);
      convolve_sample(p);
    } else {
      switch (p.column_tiles) {
        case 1: multiply<1>(p, f, row_tiles); break;
        case 2: multiply<2>(p, f, row_tiles); break;
        case 4: multiply<4>(p, f, row_tiles); break;
        default: multiply<8>(p, f, row_tiles);
      }
    }
    mark(3);
    sync_block();
    mark(4);
    if (works) epilogue(part, parameters, todo);
    mark(7);
  }
  DPA_DEVICE void receive(int f) {
    const TeamPhase& p = of(f);
    if constexpr (Handover<Tile>::kWords) {
      handover.receive(p, {p.out, p.out_pitch, p.out_rows, p.out_padded, a.halo}, samples, flag, watch);
      sync_block();
    } else {
      handover.wait(bytes_behind(f + 2));
    }
  }

  // The 1x1 convolution to the actions, of the block's channels; then, in every block, the scheduler's step.
  DPA_DEVICE void tail() {
    const int own = of(0).channels, count = samples * a.horizon * a.actions, per_sample = a.horizon * a.actions;
    const float *values = at<float>(a.shared.tail_values),
                *weights = at<float>(a.shared.head) + (a.taps + 1) * a.actions * own;
    sync_block();
    for (int i = thread(); i < count; i += kThreads) {
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
      sync_block();
    } else {
      handover.wait(bytes_behind(a.num_phases + 1));
    }
    const float* sums = at<float>(a.shared.tail_words);
    for (int i = thread(); i < count; i += kThreads) {
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
    sync_block();
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
      tail();
    }
  }
};

template <class Tile, template <class> class Handover>
DPA_DEVICE void run_team(const TeamArguments& a) {
  const int team = block() / kTeamBlocks, rank = block() % kTeamBlocks, sample0 = team * a.team_samples;
  const int samples = a.batch - sample0 < a.team_samples ? a.batch - sample0 : a.team_samples;
  Handover<Tile> handover(a, team);
  fill_team_tables<Tile>(a, rank, samples, sample0);
  handover.meet();
  TeamStream<Tile> stream(a.weights, make_team_runs<Tile>(a, rank), a.steps, a.slots);
  TeamLoop<Tile, Handover> loop = {a, stream, handover, {a.workspace}, rank, samples, sample0};
  loop.run();
  copies_wait<0>();
  handover.meet();  // nobody leaves while a peer may store into its memory
}

}  // namespace dpa::kernels::unet1d::device
