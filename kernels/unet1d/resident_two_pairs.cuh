// The arithmetic warps of the resident kernel for one sample with two channel pairs a thread. The steps between two
// layers are those of resident_solo.cuh, in an earlier form: partial sums travel as floats whatever the weights' type,
// those of a residual are waited for before the layer's own, and no clocks are recorded.
#pragma once
#include "kernels/unet1d/resident_block.cuh"

namespace dpa::kernels::unet1d {

template <class Weight>
struct TwoPairs : Block<Weight> {
  static constexpr int kPairs = 2;
  using Base = Block<Weight>;
  using Math = typename Base::Math;
  using Base::a, Base::shared, Base::ring, Base::tid, Base::warp, Base::lane, Base::m, Base::k, Base::zero, Base::step,
      Base::phase;
  static constexpr bool kWide = Base::kWide, kScaled = sizeof(Weight) == 1;
  static constexpr int kElement = kWide ? 4 : 2, kStepBytes = 16 * kElement, kShare = kSoloShareFloats * kPairs;

  struct Parameters {
    float2 bias, gamma, beta, scale, shift;
  };
  __device__ __forceinline__ void fetch(Parameters& p, const SoloLayer& l, int c) const {
    p.bias = Base::fetch_pair(a.floats + l.bias + c);
    if (l.norm >= 0) {
      p.gamma = Base::fetch_pair(a.floats + l.norm + c);
      p.beta = Base::fetch_pair(a.floats + l.norm + l.channels + c);
    }
    if (l.film >= 0) {
      const float* at = a.film_step + step * a.film_step_stride + l.film + c;
      if (a.film_scale) p.scale = Base::fetch_pair(at);
      p.shift = Base::fetch_pair(at + (a.film_scale ? l.channels : 0));
    }
  }

  // The weights of a product, as many stages as the ring holds: lane i waits for stage i.
  __device__ __forceinline__ int wait_weights(int stages) const {
    const int count = min(stages, ring.stages);
    if (lane < count) ring.wait_ahead(lane);
    __syncwarp();
    return count;
  }

  // Zeros before and after the times: a warp a row.
  __device__ __forceinline__ void pad_input(const SoloLayer& l) const {
    const int halo = a.layout.halo;
    if (warp < 2 * halo) {
      const int row = warp < halo ? l.input - (warp + 1) * l.pitch : l.last_row + (warp - halo) * l.pitch;
      for (int c = lane * 16; c < l.pitch; c += 512) {
        *reinterpret_cast<uint4*>(shared + row + c) = make_uint4(0, 0, 0, 0);
        if (kWide)
          *reinterpret_cast<uint4*>(shared + row + c + a.layout.input_low - a.layout.input) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ __forceinline__ void receive(const uint32_t* first, int partial, int apart, int count,
                                          float2 (&sum)[kPairs]) const {
    // Only what is missing is asked for again: the weights stream through the same L2.
    uint2 words[kPairs][kSlicesIn];
    const uint32_t stale = phase ^ 1;
    auto missing = [&](uint2 w) { return ((w.x ^ phase) | (w.y ^ phase)) & 1; };
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
#pragma unroll
      for (int s = 0; s < kSlicesIn; s++) words[i][s] = i < count ? make_uint2(stale, stale) : make_uint2(phase, phase);
    }
    uint32_t wrong;
    do {
      wrong = 0;
#pragma unroll
      for (int i = 0; i < kPairs; i++) {
#pragma unroll
        for (int s = 0; s < kSlicesIn; s++) {
          if (missing(words[i][s])) words[i][s] = ptx::load_message(first + i * apart + s * partial);
        }
      }
#pragma unroll
      for (int i = 0; i < kPairs; i++) {
#pragma unroll
        for (int s = 0; s < kSlicesIn; s++) wrong |= missing(words[i][s]);
      }
    } while (wrong);
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      float x[kSlicesIn], y[kSlicesIn];
#pragma unroll
      for (int s = 0; s < kSlicesIn; s++) x[s] = __uint_as_float(words[i][s].x), y[s] = __uint_as_float(words[i][s].y);
      sum[i] = make_float2(sum_of(x), sum_of(y));
    }
  }

  // Mean and inverse deviation of the group. 16-bit weights: sums and sums of squares. float32: each warp around its
  // first value, so that nothing cancels.
  __device__ __forceinline__ float2 moments(const float2 (&v)[kPairs], int pairs) const {
    float2* sums = reinterpret_cast<float2*>(shared + a.layout.sums);
    const float pivot = kWide ? __shfl_sync(~0u, v[0].x, 0) : 0.0f;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const bool valid = i * kThreads + tid < pairs;
      const float x = valid ? v[i].x - pivot : 0.0f, y = valid ? v[i].y - pivot : 0.0f;
      sum += x + y;
      squares = fmaf(x, x, fmaf(y, y, squares));
    }
#pragma unroll
    for (int i = 16; i; i >>= 1) {
      sum += __shfl_xor_sync(~0u, sum, i);
      squares += __shfl_xor_sync(~0u, squares, i);
    }
    auto count = [&](int w) {
      int n = 0;
#pragma unroll
      for (int i = 0; i < kPairs; i++) n += 2 * max(0, min(32, pairs - i * kThreads - w * 32));
      return static_cast<float>(n);
    };
    if (kWide) {
      const float n = count(warp), mean = n > 0.0f ? sum / n : 0.0f;
      squares = fmaxf(squares - sum * mean, 0.0f);
      sum = pivot + mean;
    }
    if (lane == 0) sums[warp] = make_float2(sum, squares);
    sync_consumers();
    float s[kConsumerWarps], q[kConsumerWarps];
#pragma unroll
    for (int w = 0; w < kConsumerWarps; w += 2) {
      const float4 two = *reinterpret_cast<const float4*>(sums + w);
      s[w] = two.x, q[w] = two.y, s[w + 1] = two.z, q[w + 1] = two.w;
    }
    const float inverse = __fdividef(0.5f, static_cast<float>(pairs));
    if constexpr (!kWide) {
      const float mean = sum_of(s) * inverse;
      return make_float2(mean, rsqrtf(fmaxf(fmaf(-mean, mean, sum_of(q) * inverse), 0.0f) + 1e-5f));
    } else {
      float part[kConsumerWarps];
#pragma unroll
      for (int w = 0; w < kConsumerWarps; w++) part[w] = count(w) * s[w];
      const float mean = sum_of(part) * inverse;
#pragma unroll
      for (int w = 0; w < kConsumerWarps; w++) part[w] = fmaf(count(w) * (s[w] - mean), s[w] - mean, q[w]);
      return make_float2(mean, rsqrtf(sum_of(part) * inverse + 1e-5f));
    }
  }

  __device__ __forceinline__ void write_input(int at, float2 v) const {
    if constexpr (kWide) {
      uint2 high, low;
      Math::split(v.x, high.x, low.x);
      Math::split(v.y, high.y, low.y);
      *reinterpret_cast<uint2*>(shared + at) = high;
      *reinterpret_cast<uint2*>(shared + at + a.layout.input_low - a.layout.input) = low;
    } else {
      *reinterpret_cast<uint32_t*>(shared + at) = pack_pair(v.x, v.y, typename Math::Activation());
    }
  }

  // The output of `source` becomes the input of `target`, or, for the last, the tail's values. Returns the stages
  // waited for.
  __device__ __forceinline__ int prepare(const SoloLayer& source, const SoloLayer& target, bool first, bool tail) {
    const SoloLayer from = source, to = target;  // in registers
    const int c = (tid & ((1 << from.half_log2) - 1)) * 2, t = tid >> from.half_log2, slice = k << (from.half_log2 + 1);
    const int times_apart = kThreads >> from.half_log2, count = (from.pairs - tid + kThreads - 1) / kThreads;
    Parameters p = {};
    fetch(p, from, slice + c);
    const uint32_t* at = a.messages + (t * from.channels + slice + c);
    float2* residual = reinterpret_cast<float2*>(shared + a.layout.residual) + tid;
    const int apart = times_apart * from.channels;
    int waited = 0;
    if (!tail) {
      pad_input(to);
      waited = wait_weights(to.stages);
    }
    float2 v[kPairs], r[kPairs];
    if (from.residual_message >= 0) {  // published a layer earlier: it is there already
      const float2 bias = Base::fetch_pair(a.floats + from.other_bias + slice + c);
      receive(at + from.residual_message, from.partial, apart, count, r);
#pragma unroll
      for (int i = 0; i < kPairs; i++) r[i] = make_float2(r[i].x + bias.x, r[i].y + bias.y);
    } else if (from.flags & kSoloAdd) {
#pragma unroll
      for (int i = 0; i < kPairs; i++) r[i] = residual[i * kThreads];
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; i++) r[i] = make_float2(0.0f, 0.0f);
    }
    if (first) {
#pragma unroll
      for (int i = 0; i < kPairs; i++)
        v[i] = i < count ? Base::first_conv(p.bias, Base::fetch_pair(a.floats + from.other_bias + slice + c),
                                            2 << from.half_log2, 0, t + i * times_apart, c, tid + i * kThreads)
                         : make_float2(0.0f, 0.0f);
    } else {
      receive(at + from.message, from.partial, apart, count, v);
#pragma unroll
      for (int i = 0; i < kPairs; i++) v[i] = make_float2(v[i].x + p.bias.x, v[i].y + p.bias.y);
    }
    if (from.norm >= 0) {
      const float2 moment = moments(v, from.pairs);
      const float2 gain = make_float2(moment.y * p.gamma.x, moment.y * p.gamma.y);
#pragma unroll
      for (int i = 0; i < kPairs; i++) {
        v[i].x = Base::activate(fmaf(v[i].x - moment.x, gain.x, p.beta.x));
        v[i].y = Base::activate(fmaf(v[i].y - moment.x, gain.y, p.beta.y));
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      if (from.film >= 0) {
        if (a.film_scale) v[i].x *= p.scale.x, v[i].y *= p.scale.y;
        v[i].x += p.shift.x, v[i].y += p.shift.y;
      }
      v[i].x += r[i].x, v[i].y += r[i].y;
      if (i >= count) continue;
      if (from.flags & kSoloKeep) residual[i * kThreads] = v[i];
      if (from.skip_out >= 0) reinterpret_cast<float2*>(shared + from.skip_out)[tid + i * kThreads] = v[i];
      if (tail) {
        reinterpret_cast<float2*>(shared + a.layout.stash)[tid + i * kThreads] = v[i];
      } else {
        const int row = to.input + (t + i * times_apart) * to.pitch + c * kElement;
        write_input(row, v[i]);
        if (to.skip_in >= 0)
          write_input(row + to.skip_bytes, reinterpret_cast<const float2*>(shared + to.skip_in)[tid + i * kThreads]);
      }
    }
    sync_consumers();
    return waited;
  }

  template <int kRows, int kColumns>
  struct Fragments {
    typename Math::Raw w[kRows * sizeof(Weight) <= 16 ? kRows : 1];
    typename Math::B x[kColumns];
  };

  // One segment: this warp's steps of K, all row tiles. Weights are taken in chunks of stages: lane i waits for the
  // chunk's stage i and gives it back, and in between nothing but addresses, loads and products.
  template <int kRows, int kColumns>
  __device__ __forceinline__ void segment(const SoloLayer& l, int steps, int first, int& waited,
                                          const uint32_t (&rows)[kColumns], float* out) {
    constexpr int kStep = kRows * Math::kBytes, kRound = kConsumerWarps * kStep;  // bytes
    constexpr int kChunk = kRound > 2 * kStageBytes ? kRound / kStageBytes
                           : kRound > kStageBytes   ? 2
                           : kScaled                ? 1
                                                    : 3;                   // stages
    constexpr int kRounds = kChunk * kStageBytes / kRound;  // of a chunk
    constexpr bool kAtOnce = kRows * sizeof(Weight) <= 16, kAhead = kRows * sizeof(Weight) <= 8;
    const int rounds = (steps + kConsumerWarps - 1) / kConsumerWarps, ring_bytes = ring.stages * kStageBytes;
    const uint8_t* tiles = shared + a.layout.ring + lane * Math::kLaneBytes;
    float sum[kRows][kColumns][4] = {};
    int s = warp, at = ring.stage * kStageBytes + warp * kStep, left = (steps * kStep + kStageBytes - 1) / kStageBytes;
    if (at >= ring_bytes) at -= ring_bytes;
    const uint8_t* now = tiles;
    auto load = [&](Fragments<kRows, kColumns>& f) {
      may_be_late();
      now = tiles + at;
      if constexpr (kAtOnce) {
#pragma unroll
        for (int i = 0; i < kRows; i++) f.w[i] = Math::load_raw(now + i * Math::kBytes, 0, true);
      }
      Base::template load_columns<kColumns>(f.x, rows,
                                            first + s * kStepBytes + (s * l.steps_inverse >> 16) * l.tap_bytes);
      s += kConsumerWarps;
      at += kRound;
      if (at >= ring_bytes) at -= ring_bytes;
    };
    auto apply = [&](const Fragments<kRows, kColumns>& f) {
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        if constexpr (!kAtOnce) {
          if (i % 2 == 0) asm volatile("" ::: "memory");  // not more than two tiles at a time: registers are short
        }
        const typename Math::A w =
            Math::widen_raw(kAtOnce ? f.w[kAtOnce ? i : 0] : Math::load_raw(now + i * Math::kBytes, 0, true));
#pragma unroll
        for (int j = 0; j < kColumns; j++) Math::multiply(sum[i][j], w, f.x[j]);
      }
    };
    for (int base = 0; base < rounds; base += kRounds) {
      const int stages = min(kChunk, left);
      left -= stages;
      if (waited < stages) {
        if (lane < stages) ring.wait_ahead(lane);
        __syncwarp();
        waited = stages;
      }
      waited -= stages;
      int n = min(kRounds, rounds - base);
      if (base + n == rounds && s + (n - 1) * kConsumerWarps >= steps) n--;  // the last round has no step for this warp
      if constexpr (kAhead) {
        Fragments<kRows, kColumns> even, odd;
        if (n > 0) load(even);
#pragma unroll 1
        for (; n > 1; n -= 2) {
          load(odd);
          apply(even);
          if (n > 2) load(even);
          apply(odd);
        }
        if (n > 0) apply(even);
      } else {
#pragma unroll 1
        for (; n > 0; n--) {
          Fragments<kRows, kColumns> f;
          load(f);
          apply(f);
        }
      }
      ring.release(lane, stages);
    }
    constexpr int kPitch = 16 * kRows + 4;
    float* mine = out + warp * kShare + lane % 4 * 2 * kPitch + lane / 4;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (j * 8 + lane % 4 * 2 + (e & 1) < l.columns) {
#pragma unroll
          for (int i = 0; i < kRows; i++) mine[(j * 8 + (e & 1)) * kPitch + i * 16 + (e >> 1) * 8] = sum[i][j][e];
        }
      }
    }
  }

  template <int kRows, int kColumns>
  __device__ __forceinline__ void multiply(const SoloLayer& l, int waited) {
    uint32_t rows[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; i++) {  // with 16-bit inputs one load serves two column tiles
      const int n = i * 8 + (!kWide && kColumns > 1 && i % 2 == 0 ? lane >> 4 << 3 : 0) + (lane & 7);
      rows[i] = Base::base + l.input + (n < l.columns ? n : 0) * l.stride + (kWide ? lane >> 3 : lane >> 3 & 1) * 16;
    }
    constexpr int kLog2 = kRows == 1 ? 4 : kRows == 2 ? 5 : kRows == 4 ? 6 : 7, kPitch = 16 * kRows + 4;
    const int row = tid & (16 * kRows - 1), n0 = tid >> kLog2;
    float* partial = Base::floats_at(a.layout.partial);
    const int second = l.steps[1];
    float scale[2] = {1.0f, 1.0f};
    if constexpr (kScaled) {
      const float* at = a.floats + l.scale + (m << kLog2) + row;
      scale[0] = Base::fetch(at);
      if (second) scale[1] = Base::fetch(at + l.channels);
    }
    for (int s = 0; s < (second ? 2 : 1); s++) {
      segment<kRows, kColumns>(l, s ? second : l.steps[0], s ? l.first[1] : l.first[0], waited, rows,
                               partial + s * kConsumerWarps * kShare);
    }
    sync_consumers();
    may_be_late();
    uint32_t* out = a.messages + (k * l.partial + (m << kLog2) + row + n0 * l.out_stride);
    for (int s = 0; s < (second ? 2 : 1); s++) {
      uint32_t* to = out + (s ? l.out[1] : l.out[0]);
#pragma unroll
      for (int i = 0; i < kPairs; i++) {
        const int n = n0 + i * (kThreads >> kLog2);
        if (n < l.columns) {
          float v[kConsumerWarps];
#pragma unroll
          for (int w = 0; w < kConsumerWarps; w++)
            v[w] = partial[s * kConsumerWarps * kShare + w * kShare + n * kPitch + row];
          const float sum = kScaled ? sum_of(v) * (s ? scale[1] : scale[0]) : sum_of(v);
          ptx::store_message_word(to + i * (kThreads >> kLog2) * l.out_stride, (__float_as_uint(sum) & ~1u) | phase);
        }
      }
    }
  }

  __device__ __forceinline__ void product(const SoloLayer& layer, int waited) {
    const SoloLayer l = layer;  // in registers
    switch (l.shape) {
      case 0x11: multiply<1, 1>(l, waited); break;
      case 0x12: multiply<1, 2>(l, waited); break;
      case 0x21: multiply<2, 1>(l, waited); break;
      case 0x22:
        if constexpr (kPairs > 1) multiply<2, 2>(l, waited);
        break;
      case 0x41: multiply<4, 1>(l, waited); break;
      default: multiply<8, 1>(l, waited); break;
    }
  }

  __device__ __forceinline__ void run() {
    const SoloLayer* layers = reinterpret_cast<const SoloLayer*>(shared + a.layout.descriptors);
    const int count = a.layout.count;
    for (step = 0; step < a.steps; step++) {
      phase = (step & 1) ^ 1;
      for (int i = 0; i <= count; i++) {
        const bool tail = i == count;
        const int waited = prepare(layers[i], layers[tail ? i : i + 1], i == 0, tail);
        if (!tail) product(layers[i + 1], waited);
      }
      Base::tail(1);
    }
  }
};

}  // namespace dpa::kernels::unet1d
