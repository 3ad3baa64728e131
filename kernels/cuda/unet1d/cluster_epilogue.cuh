// Outputs of the clustered kernel, by a warpgroup: the sums of its units from all blocks that share them, two channels
// at two times of one sample a thread; then bias, GroupNorm, Mish, FiLM and residual; written as messages. And, between
// two steps, the end of one and the beginning of the next.
#pragma once
#include "kernels/cuda/unet1d/cluster_block.cuh"

namespace dpa::kernels::unet1d {

template <class T, bool kAlone>
struct ClusterEpilogue : ClusterRole {
  // The values of a thread: of the first channel at both times, then of the second.
  struct Values {
    float v[4];
  };

  float2 (&partial)[kGroupThreads / 32];  // moments of a warp
  ClusterMoments& of_blocks;
  uint32_t phases = 0;  // a bit a barrier of sums
  uint32_t norms = 0;   // that were exchanged
  Values residual;

  __device__ ClusterEpilogue(const ClusterRole& role, float2 (&moments)[kGroupThreads / 32], ClusterMoments& exchanged)
      : ClusterRole(role), partial(moments), of_blocks(exchanged) {}

  __device__ __forceinline__ void sync() const { ptx::sync_threads(2, kGroupThreads); }

  __device__ __forceinline__ void expect(const ClusterLayer& l, int which) const {
    if (thread == 0) ptx::barrier_expect(ptx::shared_address(&barriers.sums_full[which]), l.pitch * l.ways);
  }
  // The sum, in the order of their ranks, of what the blocks have sent.
  __device__ __forceinline__ Values collect(const ClusterLayer& l, const ThreadShare& s, int which) {
    ptx::barrier_wait(ptx::shared_address(&barriers.sums_full[which]), phases >> which & 1);
    phases ^= 1u << which;
    inject_test_delay();
    Values total = {};
    if (!s.valid) return total;
    const int pitch = l.pitch;
    const uint8_t* from = shared + a.layout.sums + which * a.layout.sums_bytes + thread * 8;
    for (int first = 0; first < l.ways; first += 8, from += 8 * pitch) {
      uint2 part[8];
#pragma unroll
      for (int i = 0; i < 8; i++)
        part[i] = kAlone && i >= l.ways ? make_uint2(0, 0) : *reinterpret_cast<const uint2*>(from + i * pitch);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float2 x = unpack_pair<T>(part[i].x), y = unpack_pair<T>(part[i].y);
        total.v[0] += x.x, total.v[1] += x.y, total.v[2] += y.x, total.v[3] += y.y;
      }
    }
    return total;
  }
  static __device__ __forceinline__ void add(Values& to, float first, float second) {
    to.v[0] += first, to.v[1] += first, to.v[2] += second, to.v[3] += second;
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

  // What the norm needs of a layer; warps: of a unit.
  struct Norm {
    bool film;
    int warps_log2;
    float inverse_count;
    __device__ explicit Norm(const ClusterLayer& l)
        : film(l.film >= 0), warps_log2(l.rows_log2 + l.times_log2 - 7), inverse_count(l.inverse_count) {}
  };
  // The sum, in the order of their ranks, of what the cluster's blocks have. Whoever sends those of the norm after next
  // has those of the next from all, who have read these before.
  __device__ __forceinline__ float2 exchange(const float2& mine) {
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
      const float4 v = two[i];
      total.x += v.x + v.z, total.y += v.y + v.w;
    }
    return total;
  }

  // Mean and inverse deviation of the thread's unit. The whole warpgroup calls, and meets.
  __device__ __forceinline__ float2 moments(const Norm& n, const Values& x) {
    float sum = (x.v[0] + x.v[1]) + (x.v[2] + x.v[3]),
          squares = fmaf(x.v[0], x.v[0], x.v[1] * x.v[1]) + fmaf(x.v[2], x.v[2], x.v[3] * x.v[3]);
#pragma unroll
    for (int i = 16; i; i >>= 1) {
      sum += __shfl_xor_sync(~0u, sum, i);
      squares += __shfl_xor_sync(~0u, squares, i);
    }
    if (lane == 0) partial[warp] = make_float2(sum, squares);
    sync();
    const float4 first = reinterpret_cast<const float4*>(partial)[0],
                 second = reinterpret_cast<const float4*>(partial)[1];
    const float2 one = {first.x + first.z, first.y + first.w}, two = {second.x + second.z, second.y + second.w};
    const float2 pair = warp < 2 ? one : two;
    float2 total = kAlone || n.warps_log2 == 2 ? make_float2(one.x + two.x, one.y + two.y)
                   : n.warps_log2 == 1         ? pair
                                               : make_float2(sum, squares);
    if constexpr (kAlone) total = exchange(total);
    const float mean = total.x * n.inverse_count;
    return make_float2(mean, ptx::rsqrt_approx(fmaxf(fmaf(-mean, mean, total.y * n.inverse_count), 0.0f) + 1e-5f));
  }

  // Bias is in `x` already. The whole warpgroup calls.
  __device__ __forceinline__ void modulate(const Norm& n, const Parameters& r, Values& x, const AckTargets& acks,
                                           bool now) {
    const float2 m = moments(n, x);
    acknowledge(acks, now);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float& v = x.v[i];
      v = quick_mish(fmaf((v - m.x) * m.y, i < 2 ? r.gamma.x : r.gamma.y, i < 2 ? r.beta.x : r.beta.y));
    }
    if (!n.film) return;
    if (a.film_scale) {
      const float first = r.scale.x + r.more_scale.x, second = r.scale.y + r.more_scale.y;
      x.v[0] *= first, x.v[1] *= first, x.v[2] *= second, x.v[3] *= second;
    }
    add(x, r.shift.x + r.more_shift.x, r.shift.y + r.more_shift.y);
  }

  // Writes a word of this step, and makes the last step's unwritten again: all who share this block's units have
  // received this GEMM's input, which nobody has before all have read what the last step handed over here.
  __device__ __forceinline__ void store_and_reset(uint8_t* at, uint32_t word) const {
    ptx::store_message_word(at, word);
    ptx::store_message_word(at + (step & 1 ? -a.layout.message_bytes : a.layout.message_bytes), kUnwritten);
  }
  // Where this thread's words of a GEMM go.
  struct Target {
    bool valid;
    uint8_t* at;
    int64_t next;
  };
  __device__ __forceinline__ Target target(const ClusterLayer& l, const ClusterTile& p) const {
    const OutputWord word(l, p, thread, a.layout.chunk_log2);
    return {word.valid, messages_of(step) + l.message + word.at, word.next - word.at};
  }
  __device__ __forceinline__ void publish(const Target& to, const Values& x) const {
    const uint32_t first = ptx::transpose(pack_pair<T>(x.v[0], x.v[1])),
                   second = ptx::transpose(pack_pair<T>(x.v[2], x.v[3]));
    inject_test_delay();
    if (!to.valid) return;
    store_and_reset(to.at, first);
    store_and_reset(to.at + to.next, second);
  }

  // Acknowledges that the sums have been read. The whole warpgroup has met since.
  __device__ __forceinline__ void acknowledge(const AckTargets& acks, bool now) const {
    if (now && thread < acks.count)
      ptx::barrier_arrive_cluster(
          ptx::cluster_address(ptx::shared_address(&barriers.sums_empty[rank]), acks.first + thread));
  }
  // What lies behind a signal's last time is zero, in norms and for the next GEMM.
  __device__ __forceinline__ void clear_beyond(const ClusterLayer& l, const ClusterTile& p, const ThreadShare& s,
                                               Values& x) const {
    if constexpr (!kAlone) return;
    const int early = l.upsample ? 2 * s.time + p.segment : s.time,
              late = l.upsample ? early + 2 * s.gap : early + s.gap;
    if (early >= l.times) x.v[0] = x.v[2] = 0.0f;
    if (late >= l.times) x.v[1] = x.v[3] = 0.0f;
  }

  // From sums to the GEMM's output.
  __device__ __forceinline__ void finish(const ClusterLayer& l, const ClusterTile& p, const ThreadShare& s,
                                         const Parameters& r) {
    const bool with_residual = has_residual(l);
    expect(l, 0);
    if (with_residual) expect(l, 1);
    // Before the sums are there, and not after.
    const Target to = target(l, p);
    const Norm norm(l);
    const AckTargets acks(l, p);
    const bool normed = l.norm >= 0, added = l.add, kept = l.keep, last = l.message < 0;
    Values x = collect(l, s, 0);
    add(x, r.bias.x, r.bias.y);
    clear_beyond(l, p, s, x);
    const bool early = !with_residual;
    if (normed)
      modulate(norm, r, x, acks, early);
    else
      sync(), acknowledge(acks, early);
    if (added)
#pragma unroll
      for (int i = 0; i < 4; i++) x.v[i] += residual.v[i];
    clear_beyond(l, p, s, x);
    if (kept) residual = x;
    if (last)
      tail(l, s, x);
    else
      publish(to, x);
    if (with_residual) {
      residual = collect(l, s, 1);
      if (s.valid) {
        const float2 bias = fetch_two(a.floats + l.bias[1] + s.channel);
        add(residual, bias.x, bias.y);
      }
    }
    __threadfence();  // whoever receives what follows from the next GEMM finds the other half unwritten
    sync();
    acknowledge(acks, !early);
  }

  // The part of an action that 16 channels have, as a message: (sample, channels / 16, time, action).
  __device__ __forceinline__ int64_t tail_word(int sample, int part, int i) const {
    return a.layout.tail_message +
           (static_cast<int64_t>(sample * (layers[0].channels / 16) + part) * a.horizon * a.actions + i) * 4;
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
        float early = fmaf(x.v[0], w[k].x, x.v[2] * w[k].y), late = fmaf(x.v[1], w[k].x, x.v[3] * w[k].y);
#pragma unroll
        for (int i = 4; i < 32; i <<= 1) early += __shfl_xor_sync(~0u, early, i), late += __shfl_xor_sync(~0u, late, i);
        if (!s.valid || lane >= 4) continue;
        uint8_t* at = messages_of(step) + tail_word(s.sample, s.channel / 16, s.time * a.actions + d);
        if (!kAlone || s.time < l.times) store_and_reset(at, min(__float_as_uint(early), kUnwritten - 1));
        if (!kAlone || s.time + s.gap < l.times)
          store_and_reset(at + s.gap * a.actions * 4, min(__float_as_uint(late), kUnwritten - 1));
      }
    }
  }

  __device__ __forceinline__ float with_condition(float x, int64_t i) const {
    return a.condition_mask && a.condition_mask[i] ? a.condition_data[i] : x;
  }

  // Element i of the network's last output, from the parts that others have handed over.
  __device__ __forceinline__ float output_of(int sample, int i) const {
    const uint8_t* messages = messages_of(step - 1);
    constexpr int kTogether = 16;
    const int parts = layers[0].channels / 16;
    float output = a.floats[a.tail.bias + i % a.actions];
    for (int first = 0; first < parts; first += kTogether) {
      uint32_t word[kTogether];
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int g = 0; g < kTogether; g++)
          word[g] = first + g < parts ? ptx::load_message_word(messages + tail_word(sample, first + g, i)) : 0;
#pragma unroll
        for (int g = 0; g < kTogether; g++) missing |= word[g] == kUnwritten;
      } while (missing);
#pragma unroll
      for (int g = 0; g < kTogether; g++) output += __uint_as_float(word[g]);
    }
    return output;
  }

  // The sample after step `step - 1`, from the parts of its actions; every block that needs a sample computes it.
  __device__ __forceinline__ void advance_sample(const ThreadShare& s) const {
    float* x = reinterpret_cast<float*>(shared + a.layout.sample);
    const int count = a.horizon * a.actions;
    if (s.sample >= a.samples) {  // only fills the chunk up
      for (int i = thread; i < count; i += kGroupThreads) x[i] = 0.0f;
      return;
    }
    const int64_t first = static_cast<int64_t>(a.first_sample + s.sample) * count;
    float row[math::SchedulerStep<float>::kColumns] = {};
    if (a.table && step > 0)
#pragma unroll
      for (int c = 0; c < math::SchedulerStep<float>::kColumns; c++)
        row[c] = a.table[(step - 1) * math::SchedulerStep<float>::kColumns + c];
    const math::SchedulerStep<float> rule(row, 0, a.clip, a.noise != nullptr);
    for (int i = thread; i < count; i += kGroupThreads) {
      if (step == 0) {
        x[i] = with_condition(a.initial[first + i], first + i);
        continue;
      }
      // What there is to load comes before what there is to wait for.
      const float noise = a.noise ? a.noise[static_cast<int64_t>(step - 1) * a.batch * count + first + i] : 0.0f;
      const bool inpainted = a.condition_mask && a.condition_mask[first + i];
      const float given = inpainted ? a.condition_data[first + i] : 0.0f;
      float output = output_of(s.sample, i);
      if (a.table) {
        const float next = rule.step(output, x[i], noise);
        x[i] = output = inpainted ? given : next;
      }
      if (step == a.steps && s.channel == 0) a.output[first + i] = output;
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
    const int count = a.horizon * a.actions, pitch = kAlone ? 16 : l.channels;
    auto accumulate = [&](Values& to, const float* weights, int many, int early, int late) {
#pragma unroll 8
      for (int j = 0; j < many; j++, early++, late++) {
        const float first = kAlone ? weights[j * pitch] : __ldg(weights + j * pitch),
                    second = kAlone ? weights[j * pitch + 8] : __ldg(weights + j * pitch + 8);
        const float before = early >= 0 && early < count ? sample[early] : 0.0f,
                    after = late >= 0 && late < count ? sample[late] : 0.0f;
        to.v[0] = fmaf(first, before, to.v[0]), to.v[1] = fmaf(first, after, to.v[1]);
        to.v[2] = fmaf(second, before, to.v[2]), to.v[3] = fmaf(second, after, to.v[3]);
      }
    };
    const float *weights = a.floats + a.head.weights + s.channel, *others = a.floats + a.head.residual + s.channel;
    if constexpr (kAlone) {
      weights = reinterpret_cast<const float*>(shared + a.layout.head) + (thread >> 2 & 7);
      others = weights + a.taps * a.actions * 16;
    }
    const int gap = s.gap * a.actions, at = s.time * a.actions, begin = at - a.taps / 2 * a.actions;
    accumulate(x, weights, a.taps * a.actions, begin, begin + gap);
    accumulate(other, others, a.actions, at, at + gap);
  }

  // Prefetches the first convolution's weights, which have left L1 since.
  __device__ __forceinline__ void prefetch_first_conv(const ClusterLayer& l, const ThreadShare& s) const {
    const float *weights = a.floats + a.head.weights + s.channel, *others = a.floats + a.head.residual + s.channel;
    for (int j = lane & 3; j < a.taps * a.actions; j += 4) ptx::prefetch(weights + j * l.channels);
    for (int j = lane & 3; j < a.actions; j += 4) ptx::prefetch(others + j * l.channels);
  }

  // Keeps the first convolution's weights of the block's 16 channels.
  __device__ __forceinline__ void keep_first_conv() const {
    const ClusterLayer& l = layers[0];
    const int channel = ThreadShare(l, ClusterTile(l, cluster, rank), 0).channel, many = a.taps * a.actions * 16;
    float* to = reinterpret_cast<float*>(shared + a.layout.head);
    for (int i = thread; i < many + a.actions * 16; i += kGroupThreads) {
      const float* from = a.floats + (i < many ? a.head.weights : a.head.residual) + channel;
      const int j = i < many ? i : i - many;
      to[i] = from[(j >> 4) * l.channels + (j & 15)];
    }
    sync();
  }

  // Between two steps, and before the first and after the last one.
  __device__ __forceinline__ void ends() {
    const ClusterLayer& l = layers[0];
    const ClusterTile p(l, cluster, rank);
    if (p.finisher >= l.finishers) return;
    const ThreadShare s(l, p, thread);
    Parameters r = {};
    if (step < a.steps) r = fetch_parameters(l, s);
    if (!kAlone && s.valid && step < a.steps) prefetch_first_conv(l, s);
    advance_sample(ThreadShare(l, p, 0));
    sync();
    if (step == a.steps) return;
    Values x = {}, other = {};
    if (s.valid) first_conv(l, s, x, other);
    clear_beyond(l, p, s, x);
    modulate(Norm(l), r, x, AckTargets(l, p), false);
    clear_beyond(l, p, s, x);
    residual = other;
    publish(target(l, p), x);
  }

  __device__ __forceinline__ void run() {
    if constexpr (kAlone) keep_first_conv();
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
