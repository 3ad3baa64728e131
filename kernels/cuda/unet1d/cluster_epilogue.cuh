// Outputs of the clustered kernel, by a warpgroup: the sums of its units from all blocks that share them, two channels
// at two times of one sample a thread and round; then bias, GroupNorm, Mish, FiLM and residual; written as messages.
// Between two steps it makes the next sample (cluster_ends.cuh) and the first convolution.
#pragma once
#include "kernels/cuda/unet1d/cluster_ends.cuh"

namespace dpa::kernels::unet1d {

template <class T, ClusterForm kForm>
struct ClusterEpilogue : ClusterEnds {
  static constexpr bool kAlone = kForm == ClusterForm::kAlone, kGroups = kForm == ClusterForm::kGroups;
  static constexpr int kMaxRounds = kForm >= ClusterForm::kRounds ? 1 << kMaxRoundsLog2 : 1;
  // The values of a thread: in each round, of the first channel at both times, then of the second.
  struct Values {
    float v[kMaxRounds][4];
  };

  float2* const partial;  // moments of a warp; of each of its shares, where a block finishes several groups
  ClusterMoments& of_blocks;
  uint32_t phases = 0;  // a bit a barrier of sums
  uint32_t norms = 0;   // that were exchanged
  int rounds = 1;       // of the GEMM
  Values residual;

  __device__ ClusterEpilogue(const ClusterRole& role, float2* moments, ClusterMoments& exchanged)
      : ClusterEnds(role), partial(moments), of_blocks(exchanged) {}

  // Calls f(round) for the GEMM's rounds.
  template <class F>
  __device__ __forceinline__ void in_rounds(F f) const {
    f(0);
#pragma unroll
    for (int r = 1; r < kMaxRounds; r++)
      if (r < rounds) f(r);
  }

  __device__ __forceinline__ void expect(const ClusterLayer& l, int which) const {
    if (thread == 0) ptx::barrier_expect(ptx::shared_address(&barriers.sums_full[which]), l.pitch * l.ways);
  }
  // The sum, in the order of their ranks, of what the blocks have sent; `place`: of the thread's.
  __device__ __forceinline__ Values collect(const ClusterLayer& l, const ThreadShare& s, int place, int which) {
    const int pitch = l.pitch, ways = l.ways;
    const uint8_t* sums = shared + a.layout.sums + which * a.layout.sums_bytes + place;
    ptx::barrier_wait(ptx::shared_address(&barriers.sums_full[which]), phases >> which & 1);
    phases ^= 1u << which;
    inject_test_delay();
    Values total = {};
    if (!s.valid) return total;
    in_rounds([&](int r) {
      float(&to)[4] = total.v[r];
      const uint8_t* from = sums + r * 8;
      for (int first = 0; first < ways; first += kWholeWays, from += kWholeWays * pitch) {
        uint2 part[kWholeWays];
#pragma unroll
        for (int i = 0; i < kWholeWays; i++)
          part[i] = kForm != ClusterForm::kWhole && i >= ways ? make_uint2(0, 0)
                                                              : *reinterpret_cast<const uint2*>(from + i * pitch);
#pragma unroll
        for (int i = 0; i < kWholeWays; i++) {
          const float2 x = unpack_pair<T>(part[i].x), y = unpack_pair<T>(part[i].y);
          to[0] += x.x, to[1] += x.y, to[2] += y.x, to[3] += y.y;
        }
      }
    });
    return total;
  }
  __device__ __forceinline__ void add(Values& to, float first, float second) const {
    in_rounds([&](int r) { to.v[r][0] += first, to.v[r][1] += first, to.v[r][2] += second, to.v[r][3] += second; });
  }

  static __device__ __forceinline__ float2 fetch_two(const float* at) {
    return {ptx::load_constant(at), ptx::load_constant(at + 8)};
  }
  // Of both channels.
  struct Parameters {
    float2 bias, gamma, beta, scale, shift, more_scale, more_shift;
  };
  // Issues the loads of what the epilogue needs, long before the sums arrive.
  __device__ __forceinline__ Parameters fetch_parameters(const ClusterLayer& l, const ThreadShare& s) const {
    Parameters r = {};
    if (!s.valid) return r;
    r.bias = fetch_two(a.floats + l.bias[0] + s.channel);
    if (l.norm >= 0)
      r.gamma = fetch_two(a.floats + l.norm + s.channel),
      r.beta = fetch_two(a.floats + l.norm + l.channels + s.channel);
    if (l.film >= 0) {
      const int64_t sample = a.first_sample + min(s.sample, a.samples - 1);
      const float* at = a.film_step + step * a.film_step_stride + sample * a.film_sample_stride + l.film + s.channel;
      r.shift = fetch_two(at + (a.film_scale ? l.channels : 0));
      if (a.film_scale) r.scale = fetch_two(at);
      if (a.film_cond) {
        at = a.film_cond + sample * a.film_rows + l.film + s.channel;
        r.more_shift = fetch_two(at + (a.film_scale ? l.channels : 0));
        if (a.film_scale) r.more_scale = fetch_two(at);
      }
    }
    return r;
  }

  // What the norm needs of a layer; first, last: of the cluster's blocks that finish the group. several: groups in a block.
  struct Norm {
    bool film, exchanged, several = false;
    int first, last;
    float inverse_count;
    __device__ Norm(const ClusterLayer& l, int rank) : film(l.film >= 0), exchanged(l.exchange_log2 > 0) {
      const int blocks_log2 = kGroups ? max(0, l.group_shares_log2 - l.shares_log2) : l.exchange_log2;
      if (kGroups) several = l.group_shares_log2 < l.shares_log2;
      first = rank >> blocks_log2 << blocks_log2, last = first + (1 << blocks_log2);
      inverse_count = l.inverse_count;
    }
  };
  // The sum, in the order of their ranks, of what the blocks have that finish the group. All of the cluster's exchange:
  // whoever sends those of the norm after next has those of the next from all, who have read these before.
  __device__ __forceinline__ float2 exchange(const Norm& n, const float2& mine) {
    const uint32_t turn = norms & 1, barrier = ptx::shared_address(&barriers.moments_full[turn]);
    if (thread == 0) ptx::barrier_expect(barrier, sizeof(of_blocks[0]));
    if (thread < kClusterBlocks)
      ptx::send_cluster_8(ptx::cluster_address(ptx::shared_address(&of_blocks[turn][rank]), thread),
                          make_uint2(__float_as_uint(mine.x), __float_as_uint(mine.y)),
                          ptx::cluster_address(barrier, thread));
    ptx::barrier_wait(barrier, norms >> 1 & 1);
    norms++;
    float2 total = {0.0f, 0.0f};
    const auto* two = reinterpret_cast<const float4*>(of_blocks[turn]);
#pragma unroll
    for (int i = 0; i < kClusterBlocks / 2; i++) {
      if (!kAlone && (2 * i < n.first || 2 * i >= n.last)) continue;
      const float4 v = two[i];
      total.x += v.x + v.z, total.y += v.y + v.w;
    }
    return total;
  }

  // The sums of the thread's group, of several that the block finishes: of the slots, four lanes apart in eights, whose
  // shares are of it; neighbours finish neighbouring shares.
  __device__ __forceinline__ float2 sum_of_group(const ClusterLayer& l, const float2& share) {
    const int slots_log2 = l.group_shares_log2 - l.rounds_log2, slot = warp * 4 + (lane & 3);
    if (lane < 4) partial[slot] = share;
    sync();
    float2 total = {0.0f, 0.0f};
#pragma unroll 1
    for (int i = slot >> slots_log2 << slots_log2, end = i + (1 << slots_log2); i < end; i++)
      total.x += partial[i].x, total.y += partial[i].y;
    return total;
  }
  // Mean and inverse deviation of the group; threads that finish nothing have zeros. The whole warpgroup calls, and meets.
  __device__ __forceinline__ float2 moments(const ClusterLayer& l, const Norm& n, const Values& x) {
    float sum = 0.0f, squares = 0.0f;
    in_rounds([&](int r) {
      const float(&v)[4] = x.v[r];
      sum += (v[0] + v[1]) + (v[2] + v[3]);
      squares += fmaf(v[0], v[0], v[1] * v[1]) + fmaf(v[2], v[2], v[3] * v[3]);
    });
    float2 total;
    const bool several = kGroups && n.several;
#pragma unroll
    for (int i = 16; i; i >>= 1) {
      if (i == 2 && several) break;  // a share's lanes are four apart
      sum += __shfl_xor_sync(~0u, sum, i);
      squares += __shfl_xor_sync(~0u, squares, i);
    }
    if (several) {
      total = sum_of_group(l, make_float2(sum, squares));
    } else {
      if (lane == 0) partial[warp] = make_float2(sum, squares);
      sync();
      const float4 first = reinterpret_cast<const float4*>(partial)[0],
                   second = reinterpret_cast<const float4*>(partial)[1];
      total = {(first.x + first.z) + (second.x + second.z), (first.y + first.w) + (second.y + second.w)};
    }
    if (exchanges(kForm) && (kAlone || n.exchanged)) {
      const float2 all = exchange(n, total);  // a block that finishes whole groups only hears of the others
      if (!kGroups || n.last - n.first > 1) total = all;
    }
    const float mean = total.x * n.inverse_count;
    return make_float2(mean, ptx::rsqrt_approx(fmaxf(fmaf(-mean, mean, total.y * n.inverse_count), 0.0f) + 1e-5f));
  }

  // Normalised, activated, modulated; m: of moments(). Bias is in `x` already.
  __device__ __forceinline__ void modulate(const Norm& n, const Parameters& p, const float2& m, Values& x) {
    in_rounds([&](int r) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& v = x.v[r][i];
        v = quick_mish(fmaf((v - m.x) * m.y, i < 2 ? p.gamma.x : p.gamma.y, i < 2 ? p.beta.x : p.beta.y));
      }
    });
    if (!n.film) return;
    if (a.film_scale) {
      const float first = p.scale.x + p.more_scale.x, second = p.scale.y + p.more_scale.y;
      in_rounds([&](int r) { x.v[r][0] *= first, x.v[r][1] *= first, x.v[r][2] *= second, x.v[r][3] *= second; });
    }
    add(x, p.shift.x + p.more_shift.x, p.shift.y + p.more_shift.y);
  }

  // Where this thread's words of a GEMM go.
  struct Target {
    bool valid;
    uint8_t* at;
    int64_t next;
    int next_round;
  };
  __device__ __forceinline__ Target target(const ClusterLayer& l, const ClusterTile& p) const {
    const OutputWord word(l, p, thread, a.layout.chunk_log2);
    return {word.valid, messages_of(step) + l.message + word.at, word.next - word.at, word.next_round};
  }
  __device__ __forceinline__ void publish(const Target& to, const Values& x) const {
    inject_test_delay();
    in_rounds([&](int r) {
      const uint32_t first = ptx::transpose(pack_pair<T>(x.v[r][0], x.v[r][1])),
                     second = ptx::transpose(pack_pair<T>(x.v[r][2], x.v[r][3]));
      if (!to.valid) return;
      uint8_t* at = to.at + r * to.next_round;
      store_and_reset(at, first);
      store_and_reset(at + to.next, second);
    });
  }

  // Acknowledges that the sums have been read. The whole warpgroup has met since.
  __device__ __forceinline__ void acknowledge(const AckTargets& acks) const {
    if (thread >= acks.count) return;
    const int peer = acks.first + thread;
    ptx::barrier_arrive_cluster(
        ptx::cluster_address(ptx::shared_address(&barriers.sums_empty[acks.apart(peer)][rank]), peer));
  }
  // What lies behind a signal's last time is zero, in norms and for the next GEMM.
  __device__ __forceinline__ void clear_beyond(const ClusterLayer& l, const ClusterTile& p, const ThreadShare& s,
                                               Values& x) const {
    if constexpr (kForm == ClusterForm::kWhole) return;
    in_rounds([&](int r) {
      const int time = s.time + r * s.next_round, early = l.upsample ? 2 * time + p.segment : time,
                late = l.upsample ? early + 2 * s.gap : early + s.gap;
      if (early >= l.times) x.v[r][0] = x.v[r][2] = 0.0f;
      if (late >= l.times) x.v[r][1] = x.v[r][3] = 0.0f;
    });
  }

  __device__ __forceinline__ void tail(const ClusterLayer& l, const ThreadShare& s, const Values& x) const {
    constexpr int kTogether = 4;  // actions whose weights are loaded together
    for (int first = 0; first < a.actions; first += kTogether) {
      float2 w[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; k++)
        w[k] = s.valid && first + k < a.actions
                   ? fetch_two(a.floats + a.tail.weights + (first + k) * l.channels + s.channel)
                   : make_float2(0.0f, 0.0f);
#pragma unroll
      for (int k = 0; k < kTogether; k++) {
        const int d = first + k;
        if (d >= a.actions) break;
        in_rounds([&](int r) {
          const float(&v)[4] = x.v[r];
          float early = fmaf(v[0], w[k].x, v[2] * w[k].y), late = fmaf(v[1], w[k].x, v[3] * w[k].y);
#pragma unroll
          for (int i = 4; i < 32; i <<= 1)
            early += __shfl_xor_sync(~0u, early, i), late += __shfl_xor_sync(~0u, late, i);
          if (!s.valid || lane >= 4) return;
          const int time = s.time + r * s.next_round;
          uint8_t* at = messages_of(step) + tail_word(s.sample, s.channel / 16, time * a.actions + d);
          if (time < l.times) store_and_reset(at, min(__float_as_uint(early), kUnwritten - 1));
          if (time + s.gap < l.times)
            store_and_reset(at + s.gap * a.actions * 4, min(__float_as_uint(late), kUnwritten - 1));
        });
      }
    }
  }

  // The first convolution and its residual from the sample itself.
  __device__ __forceinline__ void first_conv(const ClusterLayer& l, const ThreadShare& s, Values& x,
                                             Values& other) const {
    const float* sample = reinterpret_cast<const float*>(shared + a.layout.sample);
    float2 bias = fetch_two(a.floats + l.bias[0] + s.channel);
    add(x, bias.x, bias.y);
    bias = fetch_two(a.floats + l.bias[1] + s.channel);
    add(other, bias.x, bias.y);
    // Taps and actions, side by side in the weights, are so in the sample too.
    const bool kept = kAlone || a.layout.head_channels > 0;
    const int count = a.horizon * a.actions, pitch = kAlone ? 16 : kept ? a.layout.head_channels : l.channels;
    auto accumulate = [&](float(&to)[4], const float* weights, int many, int early, int late) {
#pragma unroll 8
      for (int j = 0; j < many; j++, early++, late++) {
        const float first = weights[j * pitch], second = weights[j * pitch + 8];
        const float before = early >= 0 && early < count ? sample[early] : 0.0f,
                    after = late >= 0 && late < count ? sample[late] : 0.0f;
        to[0] = fmaf(first, before, to[0]), to[1] = fmaf(first, after, to[1]);
        to[2] = fmaf(second, before, to[2]), to[3] = fmaf(second, after, to[3]);
      }
    };
    const float *weights = a.floats + a.head.weights + s.channel, *others = a.floats + a.head.residual + s.channel;
    if (kept) {
      weights =
          reinterpret_cast<const float*>(shared + a.layout.head) + s.channel % (kAlone ? 16 : a.layout.head_channels);
      others = weights + a.taps * a.actions * pitch;
    }
    const int gap = s.gap * a.actions;
    in_rounds([&](int r) {
      const int at = (s.time + r * s.next_round) * a.actions, begin = at - a.taps / 2 * a.actions;
      accumulate(x.v[r], weights, a.taps * a.actions, begin, begin + gap);
      accumulate(other.v[r], others, a.actions, at, at + gap);
    });
  }

  // Encoded local conditions, to the first block's residual.
  __device__ __forceinline__ void add_local(const ClusterLayer& l, const ThreadShare& s, Values& other) const {
    if (!s.valid || s.sample >= a.samples) return;
    const float* from = a.local + step * a.local_step + (a.first_sample + s.sample) * a.local_sample + s.channel;
    in_rounds([&](int r) {
#pragma unroll
      for (int late = 0; late < 2; late++) {
        const int time = s.time + r * s.next_round + late * s.gap;
        if (time >= l.times) continue;
        other.v[r][late] += from[time * l.channels], other.v[r][2 + late] += from[time * l.channels + 8];
      }
    });
  }

  // From sums to the GEMM's output.
  __device__ __forceinline__ void finish(const ClusterLayer& l, const ClusterTile& p, const ThreadShare& s,
                                         const Parameters& r) {
    const bool with_residual = has_residual(l);
    rounds = 1 << l.rounds_log2;
    expect(l, 0);
    if (with_residual) expect(l, 1);
    // Before the sums are there, and not after.
    const int place = ThreadShare::first_place(l, thread) * 8;
    const Target to = target(l, p);
    const Norm norm(l, rank);
    const AckTargets acks(l, p);
    const bool normed = l.norm >= 0, added = l.add, kept = l.keep, last = l.message < 0;
    Values x = collect(l, s, place, 0);
    add(x, r.bias.x, r.bias.y);
    clear_beyond(l, p, s, x);
    // Where a unit spans tiles without a norm its blocks exchange moments too, to know of each other.
    float2 m = {};
    if (normed || (exchanges(kForm) && norm.exchanged))
      m = moments(l, norm, x);
    else
      sync();
    if (!with_residual) acknowledge(acks);
    if (normed) modulate(norm, r, m, x);
    if (added)
      in_rounds([&](int r) {
#pragma unroll
        for (int i = 0; i < 4; i++) x.v[r][i] += residual.v[r][i];
      });
    clear_beyond(l, p, s, x);
    if (kept) residual = x;
    if (last)
      tail(l, s, x);
    else
      publish(to, x);
    if (with_residual) {
      residual = collect(l, s, place, 1);
      sync();
      acknowledge(acks);
      if (s.valid) {
        const float2 bias = fetch_two(a.floats + l.bias[1] + s.channel);
        add(residual, bias.x, bias.y);
      }
    }
    __threadfence();  // whoever receives what follows from the next GEMM finds the other half unwritten
    sync();
  }

  // Between two steps, and before the first and after the last one.
  __device__ __forceinline__ void ends() {
    const ClusterLayer& l = layers[0];
    const ClusterTile p(l, cluster, rank);
    if (p.finisher >= l.finishers) return;
    const ThreadShare s(l, p, thread);
    rounds = 1 << l.rounds_log2;
    Parameters r = {};
    if (step < a.steps) r = fetch_parameters(l, s);
    if (a.layout.head_channels == 0 && s.valid && step < a.steps) prefetch_first_conv(l, s);
    residual = {};  // its registers are free
    advance_sample(ThreadShare(l, p, 0));
    sync();
    if (step == a.steps) return;
    Values x = {}, other = {};
    if (s.valid) first_conv(l, s, x, other);
    if (a.local) add_local(l, s, other);
    clear_beyond(l, p, s, x);
    const Norm norm(l, rank);
    modulate(norm, r, moments(l, norm, x), x);
    clear_beyond(l, p, s, x);
    residual = other;
    publish(target(l, p), x);
  }

  __device__ __forceinline__ void run() {
    keep_first_conv();
    for (;; step++) {
      ends();
      if (step == a.steps) return;
      ptx::sync_threads(kStepBegun, 2 * kGroupThreads);
      for (int i = 1; i <= a.layout.count; i++) {
        const ClusterLayer& l = layers[i];
        const ClusterTile p(l, cluster, rank);
        if (p.finisher >= l.finishers) continue;
        const ThreadShare s(l, p, thread);
        finish(l, p, s, fetch_parameters(l, s));
      }
    }
  }
};

}  // namespace dpa::kernels::unet1d
