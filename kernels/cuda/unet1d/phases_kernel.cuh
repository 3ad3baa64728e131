// The loop of one block: all phases of all steps.
#pragma once
#include "kernels/cuda/unet1d/phases_finish.cuh"
#include "kernels/cuda/unet1d/phases_gemm.cuh"
#include "kernels/cuda/unet1d/phases_tables.cuh"

namespace dpa::kernels::unet1d::device {

template <class Tile>
struct Loop {
  const PhaseLoop& a;
  WeightStream<Tile>& stream;
  Watch& watch;
  int step;
  uint32_t flag, previous;  // of this step, of the sample that the last one made
  bool marking;             // whether this step's clocks are kept
  int phase = 0;

  template <class T>
  DPA_DEVICE T* at(int offset) const {
    return reinterpret_cast<T*>(shared() + offset);
  }

  DPA_DEVICE void mark(int what) const {
    if (marking && thread() == 0) a.marks[(block() * a.num_phases + phase) * kPhaseMarks + what] = clock_now();
  }

  // Loads, normalises and applies the input of a tile. slab null: the values stay in the stash.
  DPA_DEVICE void input(const Work& w, uint8_t* slab, const Early& early, float* bias) {
    const Phase& p = w.p;
    float *stash = at<float>(p.shared.stash), *residual = at<float>(p.shared.residual),
          *parameters = at<float>(p.shared.parameters);
    float4* sums = at<float4>(p.shared.statistics);
    const int pitch = w.channels + 4, residual_pitch = w.value_channels + 4;
    const bool head = p.value.kind == SourceKind::kHead, head_residual = p.residual.kind == SourceKind::kHead;
    if (head || head_residual) {
      float* weights = at<float>(p.shared.sample);
      const int taps = head ? a.taps : 1;  // a phase has one of the two
      stage_head(a, w, a.floats + (head ? a.head.weights : a.head.residual),
                 a.floats + (head ? a.head.bias : a.head.residual_bias), taps, weights);
      float* sample = weights + (taps * a.actions + 1) * w.value_channels;
      load_sample(a, w, step, previous, sample, watch);
      sync_block();
      const float* const local = a.local && head_residual ? a.local + step * a.local_step : nullptr;
      convolve_sample(a, w, sample, weights, taps, local, head ? stash : residual, head ? pitch : residual_pitch);
    } else if (p.kind == PhaseKind::kTail) {
      stage_tail(w, at<float>(p.shared.sample));
    }
    mark(1);
    const int column0 = w.sample0 * p.times_in;
    const int times = marking && p.kind != PhaseKind::kTail ? 2 : 1;
#pragma unroll 1
    for (int i = 0; i < 1 + times; i++) {  // partial sums; what is older first; for a profile the value again
      if (i == 2) mark(2);
      const PhaseSource& source = i == 0 ? p.residual : p.value;
      if (source.kind != SourceKind::kPartials) continue;
      const int first = Tile::kWide ? w.first_channel : w.first_channel / 2;
      const Sums sums_of = {a.workspace + source.words + column0 * source.column_stride + first, source.partial_stride,
                            source.column_stride, i == 0 ? residual : stash, i == 0 ? residual_pitch : pitch};
      const Kept kept = {a.workspace + p.residual.words + column0 * p.residual.column_stride + w.first_channel,
                         p.residual.column_stride, i && p.residual.kind == SourceKind::kFinished ? residual : nullptr,
                         residual_pitch};
      const Kept skip = {a.workspace + p.skip.words + column0 * p.skip.column_stride + w.first_channel,
                         p.skip.column_stride, i && p.joined ? stash + w.value_channels : nullptr, pitch};
      load_source<Tile>(w, source.partials, sums_of, kept, skip, flag, watch);
    }
    store_early<Tile>(a, w, step, early, parameters, bias);
    sync_block();
    mark(8);
    if (p.norm >= 0) {
      statistics(w, stash, pitch, sums);
      sync_block();
      make_factors(w, sums, parameters);
      sync_block();
    }
#pragma unroll 1
    for (int i = 0; i < times; i++) {  // for a profile again, with warm instructions
      mark(3 + i);
      apply<Tile>(a, w, stash, pitch, residual, parameters, slab, flag);
      if (times > 1) sync_block();
    }
  }

  template <int kColumnTiles>
  DPA_DEVICE void multiply(const Work& w, const uint8_t* slab, const ColumnAt* columns, const float* bias) {
    const Phase& p = w.p;
    const int rows = w.row_tiles * 16;
#pragma unroll 1
    for (int s = 0; s < p.num_segments; s++) {
      const PhaseSegment& g = p.segments[s];
      const Output out = {a.workspace + g.out + w.at.in * p.partial_stride + g.time_first * p.column_stride +
                              w.first_tile * (Tile::kWide ? 16 : 8),
                          columns,
                          bias + 2 * s * rows,
                          rows,
                          w.samples * p.columns,
                          flag};
      float4* sums = at<float4>(p.shared.stash);
      if (s > 0) sync_block();
      multiply_tile<Tile, kColumnTiles>(stream, w, s, shared_address(slab), sums, out);
      mark(6);
      if (p.warps_k == 1) continue;
      sync_block();
      reduce_tile<Tile, kColumnTiles>(w, sums, out);
    }
  }

  // The rows of zeros before the first sample and behind each one: a warp each of these.
  DPA_DEVICE static void zero_edges(const Work& w, uint8_t* slab) {
    const int before = w.p.pad * w.slab_pitch, sample = w.sample_pitch, gap = sample - w.p.times_in * w.slab_pitch,
              samples = w.samples, own = loaded(thread());
#pragma unroll 1
    for (int b = own >> 5; b <= samples; b += kPhaseWarps) {
      const int end = before + b * sample, from = b == 0 ? 0 : end - gap;
#pragma unroll 1
      for (int at = from + (own & 31) * 16; at < end; at += 512)
        *reinterpret_cast<uint4*>(slab + at) = make_uint4(0, 0, 0, 0);
    }
  }

  DPA_DEVICE static void fill_tables(const Work& w) {
    ColumnAt* columns = reinterpret_cast<ColumnAt*>(shared() + w.p.shared.columns);
    fill_columns(w, columns), fill_offsets(w, offsets_of(w, columns));
  }
  // The next phase's entry comes while the input does: not while the GEMM needs the registers.
  DPA_DEVICE void convolve(const Work& w, const Next& next) {
    const Phase& p = w.p;
    const EntryPart entry = EntryPart::load(a, next.phase);
    const int values = loaded(w.values_each);
    if (values > 0 && values <= kGroupValues) {
      mark(1), mark(2), mark(8), mark(3), mark(4);
      float4* const moments = at<float4>(p.shared.statistics);
      GroupFinisher<Tile>(a, w).run(step, moments, flag, watch);
      entry.store(a, next.at);
      mark(5), mark(6);
      return;
    }
    const PhaseKind kind = static_cast<PhaseKind>(loaded(static_cast<int>(p.kind)));
    const bool conv = kind == PhaseKind::kConv, spread = loaded(w.spread),
               finished = loaded(static_cast<int>(p.value.kind)) == static_cast<int>(SourceKind::kFinished);
    const int pad = loaded(p.pad), tiles = loaded(p.tiles),
              parameters = loaded(p.norm) >= 0 ? loaded(w.value_channels) * (2 + 4 * loaded(w.samples)) : 0;
    Early early;
    fetch_early<Tile>(a, w, step, early);
    uint8_t* slab = at<uint8_t>(p.shared.slab);
    ColumnAt* columns = at<ColumnAt>(p.shared.columns);
    float* bias = at<float>(p.shared.parameters) + parameters;
    if (conv && (!a.shared.tables_kept || tiles > blocks())) fill_tables(w);
    if (conv && spread) {
      for (int i = thread(); i < (p.pad * w.slab_pitch + w.samples * w.sample_pitch) / 16; i += kThreads)
        reinterpret_cast<uint4*>(slab)[i] = make_uint4(0, 0, 0, 0);
    } else if (pad > 0) {
      zero_edges(w, slab);
    }
    if (conv && finished) {
      if (spread) sync_block();
      mark(1);
      load_finished<Tile>(a, w, slab, flag, watch);
      mark(2), mark(8), mark(3), mark(4);
      store_early<Tile>(a, w, step, early, nullptr, bias);
    } else {
      input(w, conv ? slab : nullptr, early, bias);
    }
    entry.store(a, next.at);
    sync_block();
    mark(5);
    mark(6);
    if (kind == PhaseKind::kTail) return actions(w);
    if (!conv) return;
    switch (p.column_tiles) {
      case 1: multiply<1>(w, slab, columns, bias); break;
      case 2: multiply<2>(w, slab, columns, bias); break;
      case 4: multiply<4>(w, slab, columns, bias); break;
      case 8: multiply<8>(w, slab, columns, bias); break;
      default:
        if constexpr (!Tile::kWide) multiply<kPhaseColumnTiles>(w, slab, columns, bias);
    }
  }

  // The weights of the convolution to the actions, (action, channel of the slice), and its bias.
  DPA_DEVICE void stage_tail(const Work& w, float* to) const {
    const int n = w.value_channels;
    Walk walk(thread(), w.by_value);
#pragma unroll 4
    for (; walk.row < a.actions; walk.next())
      to[walk.row * n + walk.column] =
          walk.column < w.real_channels
              ? a.floats[a.tail.weights + static_cast<int64_t>(walk.row) * a.channels + w.first_channel + walk.column]
              : 0.0f;
    for (int i = thread(); i < a.actions; i += kThreads)
      to[a.actions * n + i] = w.at.in == 0 ? a.floats[a.tail.bias + i] : 0.0f;
  }
  // Partial sums of the 1x1 convolution to the actions, over the slice's channels: eight lanes a sum.
  DPA_DEVICE void actions(const Work& w) {
    const float *stash = at<float>(w.p.shared.stash), *weights = at<float>(w.p.shared.sample);
    const int n = w.value_channels, pitch = w.channels + 4, all = a.batch * a.horizon * a.actions, part = thread() & 7;
    const int count = w.rows * a.actions;
    uint32_t* out = a.workspace + a.output_words + w.at.in * all + w.sample0 * a.horizon * a.actions;
#pragma unroll 1
    for (int base = 0; base < count; base += kThreads / 8) {
      const int i = base + (thread() >> 3), j = i < count ? i : 0;
      const int row = divide(j, a.actions), action = j - row * a.actions;
      const float *x = stash + row * pitch, *f = weights + action * n;
      float sum = 0.0f;
#pragma unroll 4
      for (int c = part; c < n; c += 8) sum += x[c] * f[c];
      sum += shuffle_xor(sum, 4), sum += shuffle_xor(sum, 2), sum += shuffle_xor(sum, 1);
      if (part == 0 && i < count)
        store_message_word(out + i, (bits(sum + weights[a.actions * n + action]) & ~1u) | flag);
    }
  }

  // The scheduler's step of one sample.
  DPA_DEVICE void sample(int b) {
    const int count = a.horizon * a.actions, all = a.batch * count;
    for (int i = thread(); i < count; i += kThreads) {
      const int at = b * count + i;
      uint32_t* state = a.workspace + a.sample_words + at;
      const float x = step == 0 ? initial_at(a, at) : as_float(load_message_word(state) & ~1u);
      const float noise = a.table && a.noise ? a.noise[step * a.noise_stride + at] : 0.0f;
      const bool known = a.condition_mask && a.condition_mask[at];
      float r[6] = {};
#pragma unroll
      for (int k = 0; k < 6; k++)
        if (a.table) r[k] = a.table[step * 6 + k];
      uint32_t v[8];
      const uint32_t* from = a.workspace + a.output_words + at;
      int polls = 0;
      uint32_t wrong;
      do {
        wrong = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) {
          v[k] = flag;
          if (k < a.output_slices) v[k] = load_message_word(from + k * all);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) wrong |= v[k] ^ flag;
      } while ((wrong & 1) && watch.again(polls));
      float output = 0.0f;
#pragma unroll
      for (int k = 0; k < 8; k++) output += as_float(v[k] & ~1u);
      float made = output;
      if (a.table) {
        float x0 = r[0] * x + r[1] * output;
        x0 = x0 < -a.clip ? -a.clip : x0 > a.clip ? a.clip : x0;
        made = r[2] * x0 + r[3] * x + r[4] * output;
        if (a.noise) made += r[5] * noise;
        if (known) made = a.condition_data[at];
      }
      store_message_word(state, (bits(made) & ~1u) | flag);
      if (step + 1 == a.steps) a.output[at] = made;
    }
  }

  DPA_DEVICE void run() {
#pragma unroll 1
    for (int f = 0; f < a.num_phases; f++) {
      sync_block();  // the phase's entry is there, and nobody reads the one before it
      const int at = (step * a.num_phases + f) & 1;
      const Next next = {f + 1 < a.num_phases ? f + 1 : 0, 1 - at};
      Work& w = entry(a, at);
      phase = f;
      const int tiles = w.p.tiles;
#pragma unroll 1
      for (int tile = block(); tile < tiles; tile += blocks()) {
        if (tile != block()) sync_block();  // the tile before has been read
        mark(0);
        if (w.p.kind == PhaseKind::kSampler) {
          const EntryPart entry = EntryPart::load(a, next.phase);
          sample(tile);
          entry.store(a, next.at);
        } else {
          if (tiles > blocks()) fill(w, tile);
          convolve(w, next);
        }
        mark(7);
      }
      if (block() >= tiles) EntryPart::load(a, next.phase).store(a, next.at);
    }
  }
  DPA_OUTLINE static void fill(Work& w, int tile, int batch) {
    if (thread() == 0) w.fill_tile(tile, batch, kActivationBytes<Tile>);
    sync_block();
    if (thread() < 2 * kPhaseWarps && thread() / kPhaseWarps < w.p.num_segments)
      w.fill_warp(thread() / kPhaseWarps, thread() % kPhaseWarps);
    sync_block();
  }
  DPA_DEVICE void fill(Work& w, int tile) const { fill(w, tile, a.batch); }
};

// Every phase's columns and offsets, where they have places of their own; the first phase's entry.
template <class Tile>
DPA_DEVICE void keep_tables(const PhaseLoop& a) {
#pragma unroll 1
  for (int f = a.shared.tables_kept ? a.num_phases - 1 : 0; f >= 0; f--) {
    EntryPart::load(a, f).store(a, 0);
    sync_block();
    const Work& w = entry(a, 0);
    if (a.shared.tables_kept && w.p.kind == PhaseKind::kConv && block() < w.p.tiles) Loop<Tile>::fill_tables(w);
    sync_block();
  }
}

template <class Tile>
DPA_DEVICE void run_phases(const PhaseLoop& a) {
  fill_table<Tile>(a);
  WeightStream<Tile> stream(a.weights, make_runs<Tile>(a), a.steps, a.slots);
  keep_tables<Tile>(a);
  Watch watch = {a.workspace + kStuck};
#pragma unroll 1
  for (int step = 0; step < a.steps; step++) {
    const uint32_t flag = (step + 1) & 1;
    Loop<Tile> loop = {a, stream, watch, step, flag, flag ^ 1, a.marks && step + 1 == a.steps};
    loop.run();
  }
  copy_async_wait<0>();
}

}  // namespace dpa::kernels::unet1d::device
