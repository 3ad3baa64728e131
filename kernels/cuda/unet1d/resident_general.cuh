// The arithmetic warps of the resident kernel for any number of samples: sizes are run-time values throughout.
// 8 warps = row tiles x shares of K x column tiles; the order of a layer is that of resident_solo.cuh.
#pragma once
#include "kernels/cuda/unet1d/resident_general_values.cuh"

namespace dpa::kernels::unet1d {

// pair[i] of a descriptor that lives in registers.
template <class T>
__device__ __forceinline__ T pick(const T (&pair)[2], int i) {
  return i ? pair[1] : pair[0];
}

template <class Weight>
struct General : GeneralValues<Weight> {
  using Base = GeneralValues<Weight>;
  using Parameters = typename Base::Parameters;
  using Math = typename Base::Math;
  using Base::a, Base::shared, Base::pipeline, Base::tid, Base::warp, Base::lane, Base::m, Base::k, Base::zero,
      Base::step, Base::phase, Base::kTilesPerStage;
  static constexpr bool kWide = Base::kWide;
  int waited = 0;

  // Writes a pair into the GEMM's input: row (b, t), channels c and c + 1.
  __device__ __forceinline__ void write_input(int offset, float2 v) const {
    Base::write_input(a.layout.input + offset * 2, v);
  }
  __device__ __forceinline__ int pitch(const ResidentLayer& l) const { return l.steps_per_tap * 16 + 8; }  // elements
  __device__ __forceinline__ int input_row(const ResidentLayer& l, int b, int t) const {
    return (b * (l.times_in + 2 * a.layout.halo) + t + a.layout.halo) * pitch(l);
  }

  // Zeros around every sample's times, and in channels that only fill a step up.
  __device__ __forceinline__ void pad_input(const ResidentLayer& l, int width) const {
    const int halo = a.layout.halo, channels = l.steps_per_tap * 16;
    for (int b = 0; b < a.batch; b++) {
      for (int r = 0; r < halo; r++) {
        for (int c = tid * 2; c < channels; c += kThreads * 2) {
          write_input(input_row(l, b, r - halo) + c, make_float2(0.0f, 0.0f));
          write_input(input_row(l, b, l.times_in + r) + c, make_float2(0.0f, 0.0f));
        }
      }
    }
    if (width & 15) {
      const int fill = (16 - (width & 15)) / 2, parts = l.skip_in >= 0 ? 2 : 1;
      for (int i = tid; i < a.batch * l.times_in * fill * parts; i += kThreads) {
        const int c = i % fill * 2 + width + (i / fill % parts) * l.skip_channel, row = i / fill / parts;
        write_input(input_row(l, row / l.times_in, row % l.times_in) + c, make_float2(0.0f, 0.0f));
      }
    }
  }

  // Waits for what the circular buffer can hold of a GEMM's weights, so that the GEMM itself need not.
  __device__ __forceinline__ void wait_weights(const ResidentLayer& l) {
    int needed = 0;
    for (int s = 0; s < l.num_segments; s++) needed += (pick(l.tiles, s) + kTilesPerStage - 1) / kTilesPerStage;
    waited = min(needed, pipeline.stages);
    for (int i = 0; i < waited; i++) pipeline.wait_ahead(i);
  }

  // The sums of 8 partial sums, as soon as all are there: pair i is at first + i * apart; those from `count` on are
  // left out.
  template <int Pairs>
  __device__ __forceinline__ void receive(const uint32_t* first, int apart, int count, int partial,
                                          float2 (&sum)[Pairs]) const {
    uint2 words[Pairs][kSlicesIn];
    uint32_t wrong;
    do {
      wrong = 0;
#pragma unroll
      for (int i = 0; i < Pairs; i++) {
#pragma unroll
        for (int s = 0; s < kSlicesIn; s++)
          words[i][s] = i < count ? ptx::load_message(first + i * apart + s * partial) : make_uint2(phase, phase);
      }
#pragma unroll
      for (int i = 0; i < Pairs; i++) {
#pragma unroll
        for (int s = 0; s < kSlicesIn; s++) wrong |= (words[i][s].x ^ phase) | (words[i][s].y ^ phase);
      }
    } while (wrong & 1);
#pragma unroll
    for (int i = 0; i < Pairs; i++) {
      float x[kSlicesIn], y[kSlicesIn];
#pragma unroll
      for (int s = 0; s < kSlicesIn; s++) x[s] = __uint_as_float(words[i][s].x), y[s] = __uint_as_float(words[i][s].y);
      sum[i] = make_float2(sum_of(x), sum_of(y));
    }
  }

  // Raw values of a layer, with bias; a residual that came as messages is moved into shared memory on the way.
  struct Source {
    const General& c;
    const ResidentLayer& from;
    const Parameters& p;
    bool first;
    int width;
    __device__ __forceinline__ const uint32_t* at(int64_t message, int b, int t, int channel) const {
      return c.a.messages + message + (b * from.times_out + t) * from.channels_out + c.k * width + channel;
    }
    __device__ __forceinline__ float2* residual(int unit) const {
      return reinterpret_cast<float2*>(c.shared + c.a.layout.residual) + unit;
    }
    template <int Pairs>
    __device__ __forceinline__ void read(float2 (&v)[Pairs], int b, int t, int channel, int unit, int apart,
                                         int count) const {
      const int partial = static_cast<int>(from.partial);
      if (from.residual_message >= 0) {  // published a layer earlier: it is there already
        c.receive(at(from.residual_message, b, t, channel), apart, count, partial, v);
#pragma unroll
        for (int i = 0; i < Pairs; i++) {
          if (i < count) residual(unit)[i * kThreads] = make_float2(v[i].x + p.other_bias.x, v[i].y + p.other_bias.y);
        }
      }
      c.receive(at(from.message[0], b, t, channel), apart, count, partial, v);
#pragma unroll
      for (int i = 0; i < Pairs; i++) v[i] = make_float2(v[i].x + p.bias.x, v[i].y + p.bias.y);
    }
    __device__ __forceinline__ float2 operator()(int b, int t, int channel, int unit) const {
      if (first) return c.first_conv(p.bias, p.other_bias, width, b, t, channel, unit);
      float2 v[1];
      read(v, b, t, channel, unit, 0, 1);
      return v[0];
    }
  };

  // Values from a raw output: of the first convolution or of GEMM `before`, by messages. They become the input of
  // GEMM `after`, or, without one, the tail's.
  __device__ __forceinline__ void prepare(const ResidentLayer& before, const ResidentLayer* after, bool first) {
    const ResidentLayer from = before, to = after ? *after : before;  // in registers
    const bool tail = after == nullptr;
    const int width = from.channels_out / kSlicesIn;
    Parameters p = {};
    Base::fetch(p, from.bias[0], from.other_bias, from.norm, from.film, from.channels_out);
    if (!tail) {
      wait_weights(to);
      pad_input(to, width);
    }
    float2* residual = reinterpret_cast<float2*>(shared + a.layout.residual);
    float2* skip_out = reinterpret_cast<float2*>(shared + from.skip_out);
    const float2* skip_in = reinterpret_cast<const float2*>(shared + to.skip_in);
    float2* values = reinterpret_cast<float2*>(shared + a.layout.stash);
    Base::epilogue(p, from.norm >= 0, from.film, from.channels_out, width, from.times_out,
                   Source{*this, from, p, first, width}, [&](int b, int t, int c, int unit, float2 v) {
                     if (from.add) v = make_float2(v.x + residual[unit].x, v.y + residual[unit].y);
                     if (from.keep) residual[unit] = v;
                     if (from.skip_out >= 0) skip_out[unit] = v;
                     if (tail) {
                       values[unit] = v;
                     } else {
                       const int row = input_row(to, b, t) + c;
                       write_input(row, v);
                       if (to.skip_in >= 0) write_input(row + to.skip_channel, skip_in[unit]);
                     }
                   });
    sync_consumers();
  }

  // One segment: this warp's tiles, then its accumulators into its part of `out`. Tiles come in groups; a group is
  // loaded into registers while the one before it is multiplied.
  template <int Columns>
  __device__ __forceinline__ void segment(const ResidentLayer& l, int s, const uint32_t (&rows)[Columns], float* out) {
    constexpr int kElement = 2, kSets = Columns <= 2 ? 2 : 1;
    constexpr int kGroup = kWide ? (Columns <= 2 ? 2 : 1) : (Columns <= 2 ? 4 : Columns == 4 ? 2 : 1);
    struct Group {
      typename Math::Raw w[kGroup];
      typename Math::B x[kGroup][Columns];
    };
    const int share_log2 = l.row_tiles_log2 + l.k_warps_log2, share = 1 << share_log2, mine = warp & (share - 1);
    const int tap_bytes = pitch(l) * kElement, shift = pick(l.first, s) * tap_bytes, tiles = pick(l.tiles, s);
    const int group_tiles = kGroup << share_log2,
              groups = (tiles + group_tiles - 1) >> (share_log2 + (kGroup == 4   ? 2
                                                                   : kGroup == 2 ? 1
                                                                                 : 0));
    const int last_mask = kTilesPerStage / group_tiles - 1;  // the last group of a stage
    typename Math::Sum sum[kSets][Columns];
    int load_stage = pipeline.stage;
    auto load = [&](Group& g, int index) {
      const int base = index * group_tiles;
      if ((index & last_mask) == 0) {
        if (waited > 0)
          waited--;
        else
          ptx::barrier_wait(pipeline.full + load_stage * 8,
                            load_stage < pipeline.stage ? pipeline.phase ^ 1 : pipeline.phase);
      }
      const uint8_t* stage =
          shared + a.layout.buffer + load_stage * kStageBytes + (base & (kTilesPerStage - 1)) * Math::kBytes;
#pragma unroll
      for (int u = 0; u < kGroup; u++) {
        inject_test_delay();
        const int within = mine + (u << share_log2), p = base + within;
        const bool valid = p < tiles;
        const int step_k = valid ? p >> l.row_tiles_log2 : 0, tap = step_k * l.steps_inverse >> 16;
        g.w[u] = Math::load_raw(stage + within * Math::kBytes, lane, valid);
        Base::template load_columns<Columns>(
            g.x[u], rows,
            static_cast<uint32_t>(shift + tap * tap_bytes + (step_k - tap * l.steps_per_tap) * 16 * kElement) + zero);
      }
      if ((index & last_mask) == last_mask && ++load_stage == pipeline.stages) load_stage = 0;
    };
    auto apply = [&](const Group& g, int index) {
#pragma unroll
      for (int u = 0; u < kGroup; u++) {
        const typename Math::A w = Math::widen_raw(g.w[u]);
#pragma unroll
        for (int i = 0; i < Columns; i++) Math::multiply(sum[u % kSets][i], w, g.x[u][i]);
      }
      if ((index & last_mask) == last_mask || index + 1 == groups) pipeline.release(lane);
    };
    Group even, odd;
    load(even, 0);
    for (int g = 0; g < groups; g += 2) {
      if (g + 1 < groups) load(odd, g + 1);
      apply(even, g);
      if (g + 1 < groups) {
        if (g + 2 < groups) load(even, g + 2);
        apply(odd, g + 1);
      }
    }
    const int row_pitch = (16 << l.row_tiles_log2) + 4, columns = a.batch * l.columns_per_sample;
    const int row = (mine & ((1 << l.row_tiles_log2) - 1)) * 16 + lane / 4,
              column0 = (warp >> share_log2) * Columns * 8 + lane % 4 * 2;
    float* mine_out = out + (mine >> l.row_tiles_log2) * columns * row_pitch + row;
#pragma unroll
    for (int i = 0; i < Columns; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int n = column0 + i * 8 + (j & 1);
        float v = sum[0][i][j];
        if (kSets == 2) v += sum[kSets - 1][i][j];
        if (n < columns) mine_out[n * row_pitch + (j >> 1) * 8] = v;
      }
    }
  }

  template <int Columns>
  __device__ __forceinline__ void multiply(const ResidentLayer& l) {
    constexpr int kElement = 2;
    const int share_log2 = l.row_tiles_log2 + l.k_warps_log2, columns = a.batch * l.columns_per_sample;
    uint32_t rows[Columns];
#pragma unroll
    for (int i = 0; i < Columns; i++) {  // with 16-bit inputs one load serves two column tiles
      const int tile = (warp >> share_log2) * Columns + i + (!kWide && Columns > 1 && i % 2 == 0 ? lane >> 4 : 0);
      int n = tile * 8 + (lane & 7);
      n = n < columns ? n : 0;
      const int b = a.batch == 1 ? 0 : n / l.columns_per_sample, t = n - b * l.columns_per_sample;
      rows[i] =
          ptx::shared_address(shared + a.layout.input) + input_row(l, b, t * l.stride) * kElement + Base::lane_part();
    }
    float* partial = Base::floats_at(a.layout.partial);
    const int segment_floats = (columns << l.k_warps_log2) * ((16 << l.row_tiles_log2) + 4);
    for (int s = 0; s < l.num_segments; s++) segment<Columns>(l, s, rows, partial + s * segment_floats);
  }

  // The GEMM of a layer whose input is in place; publishes this block's partial sums.
  __device__ __forceinline__ void gemm(const ResidentLayer& layer) {
    const ResidentLayer l = layer;  // in registers
    switch (l.column_tiles) {
      case 1: multiply<1>(l); break;
      case 2: multiply<2>(l); break;
      case 4: multiply<4>(l); break;
      default:
        if constexpr (!kWide) multiply<8>(l);
        break;
    }
    sync_consumers();
    inject_test_delay();
    const int rows_log2 = l.row_tiles_log2 + 4, row_pitch = (1 << rows_log2) + 4,
              columns = a.batch * l.columns_per_sample;
    const int shares = 1 << l.k_warps_log2, share_floats = columns * row_pitch;
    for (int s = 0; s < l.num_segments; s++) {
      const float* partial = Base::floats_at(a.layout.partial) + s * shares * share_floats;
      uint32_t* out = a.messages + pick(l.message, s) + k * l.partial + (m << rows_log2);
      for (int i = tid; i < columns << rows_log2; i += kThreads) {
        const int row = i & ((1 << rows_log2) - 1), n = i >> rows_log2;
        float v[kConsumerWarps];
#pragma unroll
        for (int w = 0; w < kConsumerWarps; w++)
          v[w] = w < shares ? partial[w * share_floats + n * row_pitch + row] : 0.0f;
        const float total = sum_of(v);
        int at = n;
        if (l.upsample) {
          const int b = a.batch == 1 ? 0 : n / l.columns_per_sample;
          at = b * l.times_out + (n - b * l.columns_per_sample) * 2 + s;
        }
        ptx::store_message_word(out + static_cast<int64_t>(at) * l.channels_out + row,
                                (__float_as_uint(total) & ~1u) | phase);
      }
    }
  }

  __device__ __forceinline__ void run() {
    const ResidentLayer* layers = reinterpret_cast<const ResidentLayer*>(shared + a.layout.descriptors);
    const int count = a.layout.count;
    for (step = 0; step < a.steps; step++) {
      phase = (step & 1) ^ 1;
      for (int i = 0; i <= count; i++) {
        prepare(layers[i], i < count ? layers + i + 1 : nullptr, i == 0);
        if (i < count) gemm(layers[i + 1]);
      }
      Base::tail(a.batch);
    }
  }
};

}  // namespace dpa::kernels::unet1d
