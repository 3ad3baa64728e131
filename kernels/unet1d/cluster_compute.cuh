// The arithmetic warps of the clustered kernel: two warpgroups. The first takes products and finishes their outputs;
// the second takes residual convolutions, and otherwise helps to receive.
//
//   receive   the block's input words, as soon as they are written, into shared memory: [octet of channels][row][16
//             bytes], a row a (time, sample), samples fastest, with rows of zeros outside of the signal. So the columns
//             of a tap are the rows from tap * samples on, and no patch is ever made. For stride 2 the odd times
//             come first, then the even ones.
//   multiply  64 channels x all columns over this block's part of K, weights from the ring
//   exchange  sums to shared memory, [column][channel]; the blocks that share the tile collect those of their units
//   finish    bias, GroupNorm, Mish, FiLM, residual: four channels of one (sample, time) a thread; written as messages
#pragma once
#include "kernels/unet1d/cluster_block.cuh"

namespace dpa::kernels::unet1d {

template <class T>
struct ClusterCompute {
  const ClusterArguments& a;
  uint8_t* shared;
  ClusterBarriers& barriers;
  float2 (&sums)[kGroupThreads / 32];    // of a warp, then
  float2 (&others)[kGroupThreads / 32];  // of the units of the other half
  const int cluster, rank;
  const ClusterLayer* layers;
  const int tid, group, thread, warp, lane;  // thread, warp: in the warpgroup
  const uint32_t base;
  int step = 0;
  RingPosition at;
  uint32_t phases = 0;                    // a bit a barrier
  int unread = -1, unread_residual = -1;  // ways of the product whose sums here the other blocks may still read

  __device__ ClusterCompute(const ClusterArguments& arguments, uint8_t* memory, ClusterBarriers& b,
                            float2 (&s)[kGroupThreads / 32], float2 (&o)[kGroupThreads / 32], int c, int r)
      : a(arguments),
        shared(memory),
        barriers(b),
        sums(s),
        others(o),
        cluster(c),
        rank(r),
        layers(reinterpret_cast<const ClusterLayer*>(memory + arguments.layout.descriptors)),
        tid(threadIdx.x),
        group(uniform(threadIdx.x / kGroupThreads)),
        thread(threadIdx.x % kGroupThreads),
        warp(uniform(thread / 32)),
        lane(threadIdx.x % 32),
        base(ptx::shared_address(memory)) {}

  enum Phase { kReady, kRead = 2, kResidualRead = 4, kMoments = 6 };
  __device__ __forceinline__ void wait_phase(uint64_t& barrier, int phase) {
    ptx::barrier_wait_cluster(ptx::shared_address(&barrier), phases >> phase & 1);
    phases ^= 1u << phase;
  }
  __device__ __forceinline__ void sync_all() const { ptx::sync_threads(1, kComputeThreads); }
  __device__ __forceinline__ void sync_group() const { ptx::sync_threads(2 + group, kGroupThreads); }
  // A thread for each block that shares the tile.
  __device__ __forceinline__ void arrive(const Place& p, int i, uint64_t& barrier) const {
    if (i < 8 << p.way)
      ptx::barrier_arrive_cluster(ptx::cluster_address(ptx::shared_address(&barrier), p.first_peer + i));
  }
  static __device__ __forceinline__ bool unwritten(const uint4& v) {
    return v.x == kUnwritten || v.y == kUnwritten || v.z == kUnwritten || v.w == kUnwritten;
  }

  __device__ void receive(const ClusterLayer& l, const Place& p) {
    constexpr int kEach = kMaxWords / kComputeThreads;
    const int samples = 1 << l.samples_log2, times = 1 << l.times_in_log2, half = p.way ? rank >> 3 : 0;
    const int first = (rank & 7) * l.slice_octets + half * l.half_octets;
    const int words = l.octets << (l.times_in_log2 + l.samples_log2);
    const uint8_t* from = a.messages + l.source[half];
    uint8_t* to = shared + a.layout.activations;
    const int pad = l.pad << l.samples_log2, pads = l.stride == 2 ? pad : 2 * pad, back = l.rows - pads;
    uint4 v[kEach];
    int32_t source[kEach], target[kEach];
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int i = tid + e * kComputeThreads;
      const int s = i & (samples - 1), t = i >> l.samples_log2 & (times - 1),
                octet = i >> (l.samples_log2 + l.times_in_log2);
      source[e] = ((((first + octet) << l.times_in_log2) + t) << a.layout.chunk_log2) + p.sample0 + s;
      const int row = l.stride == 1 ? t + l.pad : (t & 1) ? t / 2 + 1 : times / 2 + 1 + t / 2;
      target[e] = i < words ? octet * l.rows + (row << l.samples_log2) + s : -1;
      v[e] = i < words ? make_uint4(kUnwritten, 0, 0, 0) : make_uint4(0, 0, 0, 0);
    }
    if (unread >= 0) wait_phase(barriers.read[unread], kRead + unread);
    if (unread_residual >= 0) wait_phase(barriers.residual_read[unread_residual], kResidualRead + unread_residual);
    for (int octet = tid / 32; octet < l.octets; octet += kComputeThreads / 32)
      for (int i = lane; i < pads; i += 32)
        *reinterpret_cast<uint4*>(to + (octet * l.rows + (i < pad ? i : i + back)) * 16) = make_uint4(0, 0, 0, 0);
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int e = 0; e < kEach; e++)
        if (unwritten(v[e])) v[e] = ptx::load_message_16(from + static_cast<int64_t>(source[e]) * 16);
#pragma unroll
      for (int e = 0; e < kEach; e++) missing |= unwritten(v[e]);
    } while (missing);
#pragma unroll
    for (int e = 0; e < kEach; e++)
      if (target[e] >= 0) *reinterpret_cast<uint4*>(to + target[e] * 16) = v[e];
    ptx::async_proxy_fence();
  }

  // The products of one segment, a stage of the ring after the other: the next stage's weights come to registers while
  // this one's products run. Steps that only fill the last stage up have weights of zero.
  template <int kColumns>
  __device__ __forceinline__ void multiply(const ClusterLayer& l, int segment, int steps, float (&sum)[kColumns / 2]) {
    const ClusterLayout& y = a.layout;
    const int stages = stages_of(steps), mask = (1 << l.steps_log2) - 1;
    const uint32_t activations = wgmma::units(base + y.activations), tiles = base + y.ring + warp * 512 + lane * 16;
    auto load = [&](uint4(&w)[kRingSteps], int q0) {
      ptx::barrier_wait(ptx::shared_address(&barriers.full[at.stage]), at.parity);
      const uint32_t from = tiles + at.stage * kRingStageBytes;
#pragma unroll
      for (int j = 0; j < kRingSteps; j++) {
        w[j] = ptx::load_shared_16(from + j * 2048);
        if (q0 + j >= steps) w[j] = make_uint4(0, 0, 0, 0);
      }
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&barriers.empty[at.stage]));
      at.advance(1, y.stages);
    };
    auto begin = [&](const uint4(&w)[kRingSteps], int q0) {
      uint64_t b[kRingSteps];
#pragma unroll
      for (int j = 0; j < kRingSteps; j++) {
        const int q = min(q0 + j, steps - 1), tap = q >> l.steps_log2;
        const int row = l.stride == 1 ? tap + l.first_row[segment]
                        : tap == 1    ? (1 << (l.times_in_log2 - 1)) + 1
                                      : tap / 2;
        b[j] = wgmma::describe(activations + (q & mask) * 2 * l.rows + (row << l.samples_log2), l.rows);
      }
      wgmma::fence();
#pragma unroll
      for (int j = 0; j < kRingSteps; j++) wgmma::multiply<T, kColumns>(sum, w[j], b[j]);
      wgmma::commit();
    };
    uint4 even[kRingSteps], odd[kRingSteps];
    if (stages > 0) load(even, 0);
#pragma unroll 1
    for (int i = 0; i < stages; i += 2) {
      begin(even, i * kRingSteps);
      const bool more = i + 1 < stages;
      if (more) load(odd, (i + 1) * kRingSteps);
      wgmma::wait<0>();
      if (!more) break;
      begin(odd, (i + 1) * kRingSteps);
      if (i + 2 < stages) load(even, (i + 2) * kRingSteps);
      wgmma::wait<0>();
    }
  }

  __device__ __forceinline__ uint32_t sums_at(int which) const {
    return a.layout.activations + which * (kTileColumns * kSumsPitch * 4);
  }

  // This warpgroup's product, if it has one, and its sums to shared memory. The whole block calls.
  template <int kColumns>
  __device__ __forceinline__ void product(const ClusterLayer& l, const Place& p, bool residual) {
    float sum[kColumns / 2] = {};
    const int main = l.upsample ? p.segment : 0, stages = a.layout.stages;
    const bool first = group == 0;
    if (first && residual) at.advance(stages_of(l.steps[1]), stages);
    const int segment = first ? main : 1;
    multiply<kColumns>(l, segment, uniform(first || residual ? l.steps[segment] : 0), sum);
    if (!first) at.advance(stages_of(l.steps[main]), stages);
    may_be_late_here();
    sync_all();  // the activations make way
    if (!first && !residual) return;
    float* to = reinterpret_cast<float*>(shared + sums_at(group)) + lane % 4 * 2 * kSumsPitch + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kColumns / 8; i++) {
      float* column = to + i * 8 * kSumsPitch;
      column[0] = sum[i * 4], column[kSumsPitch] = sum[i * 4 + 1];
      column[8] = sum[i * 4 + 2], column[kSumsPitch + 8] = sum[i * 4 + 3];
    }
  }

  // The sum, in the order of their ranks, of what the blocks that share the tile hold.
  __device__ __forceinline__ float4 collect(const Place& p, uint32_t address) const {
    float4 total = {};
    for (int first = 0; first < 8 << p.way; first += 8) {
      float4 part[8];
#pragma unroll
      for (int i = 0; i < 8; i++)
        part[i] = ptx::load_cluster_16(ptx::cluster_address(address, p.first_peer + first + i));
#pragma unroll
      for (int i = 0; i < 8; i++)
        total.x += part[i].x, total.y += part[i].y, total.z += part[i].z, total.w += part[i].w;
    }
    return total;
  }

  static __device__ __forceinline__ float4 fetch(const float* at) {
    float4 v;
    asm volatile("ld.global.nc.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
    return v;
  }
  struct Parameters {
    float4 bias, gamma, beta, scale, shift, more_scale, more_shift;
  };
  __device__ __forceinline__ int64_t film_sample(const Share& s) const {
    return a.first_sample + min(s.sample, a.samples - 1);
  }
  __device__ __forceinline__ const float* film_row(const ClusterLayer& l, const Share& s) const {
    return a.film_step + step * a.film_step_stride + film_sample(s) * a.film_sample_stride + l.film + s.channel;
  }
  // Asks L2 for the timestep's part of FiLM, which has long been written and may have left it.
  __device__ __forceinline__ void prefetch_film(const ClusterLayer& l, const Place& p) const {
    if (l.film < 0 || group > 0) return;
    const Share s(l, p, thread);
    if (!s.valid) return;
    const float* at = film_row(l, s);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    if (a.film_scale) asm volatile("prefetch.global.L2 [%0];" ::"l"(at + l.channels));
  }
  // Asks for what the first warpgroup needs to finish a product; it comes while the sums are exchanged.
  __device__ __forceinline__ Parameters fetch_parameters(const ClusterLayer& l, const Share& s) const {
    Parameters r = {};
    if (!s.valid) return r;
    r.bias = fetch(a.floats + l.bias[0] + s.channel);
    if (l.norm >= 0)
      r.gamma = fetch(a.floats + l.norm + s.channel), r.beta = fetch(a.floats + l.norm + l.channels + s.channel);
    if (l.film >= 0) {
      const float* at = film_row(l, s);
      r.shift = fetch(at + (a.film_scale ? l.channels : 0));
      if (a.film_scale) r.scale = fetch(at);
      if (a.film_cond) {
        at = a.film_cond + film_sample(s) * a.film_rows + l.film + s.channel;
        r.more_shift = fetch(at + (a.film_scale ? l.channels : 0));
        if (a.film_scale) r.more_scale = fetch(at);
      }
    }
    return r;
  }

  // Mean and inverse deviation of the thread's unit. The whole warpgroup calls, and has met behind it.
  __device__ __forceinline__ float2 moments(const ClusterLayer& l, const Place&, const Share& s, const float4& v) {
    float sum = (v.x + v.y) + (v.z + v.w), squares = fmaf(v.x, v.x, v.y * v.y) + fmaf(v.z, v.z, v.w * v.w);
#pragma unroll
    for (int i = 16; i; i >>= 1) {
      sum += __shfl_xor_sync(~0u, sum, i);
      squares += __shfl_xor_sync(~0u, squares, i);
    }
    if (lane == 0) sums[warp] = make_float2(sum, squares);
    sync_group();
    const int warps = 1 << (l.unit_threads_log2 - 5), unit = s.unit;
    auto of_unit = [&](int u) {
      float2 total = {};
      for (int w = 0; w < warps; w++) total.x += sums[u * warps + w].x, total.y += sums[u * warps + w].y;
      return total;
    };
    float2 total = of_unit(unit);
    if (l.paired) {
      if (warp == 0) {
        const int peer = rank ^ 8;
        if (lane < l.share_units)
          ptx::store_cluster_8(ptx::cluster_address(ptx::shared_address(&others[lane]), peer), of_unit(lane));
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive_cluster(ptx::cluster_address(ptx::shared_address(&barriers.moments), peer));
      }
      wait_phase(barriers.moments, kMoments);
      const float2 other = others[min(unit, l.share_units - 1)];
      total.x += other.x, total.y += other.y;
    }
    const float mean = total.x * l.inverse_count;
    return make_float2(mean, rsqrtf(fmaxf(fmaf(-mean, mean, total.y * l.inverse_count), 0.0f) + 1e-5f));
  }

  // Bias is in `v` already. The whole first warpgroup calls.
  __device__ __forceinline__ void modulate(const ClusterLayer& l, const Place& p, const Share& s, const Parameters& r,
                                           float4& v) {
    const float2 m = moments(l, p, s, v);
    v.x = quick_mish(fmaf((v.x - m.x) * m.y, r.gamma.x, r.beta.x));
    v.y = quick_mish(fmaf((v.y - m.x) * m.y, r.gamma.y, r.beta.y));
    v.z = quick_mish(fmaf((v.z - m.x) * m.y, r.gamma.z, r.beta.z));
    v.w = quick_mish(fmaf((v.w - m.x) * m.y, r.gamma.w, r.beta.w));
    if (l.film < 0) return;
    if (a.film_scale) {
      v.x *= r.scale.x + r.more_scale.x, v.y *= r.scale.y + r.more_scale.y;
      v.z *= r.scale.z + r.more_scale.z, v.w *= r.scale.w + r.more_scale.w;
    }
    v.x += r.shift.x + r.more_shift.x, v.y += r.shift.y + r.more_shift.y;
    v.z += r.shift.z + r.more_shift.z, v.w += r.shift.w + r.more_shift.w;
  }

  __device__ __forceinline__ float4& residual_of(int i) const {
    return reinterpret_cast<float4*>(shared + a.layout.residual)[i];
  }
  __device__ __forceinline__ void publish(const ClusterLayer& l, const Place& p, const Share& s,
                                          const float4& v) const {
    may_be_late_here();
    ptx::store_message_8(a.messages + l.message + s.word(l, p, a.layout.chunk_log2),
                         make_uint2(pack_pair(v.x, v.y, T()), pack_pair(v.z, v.w, T())));
  }
  static __device__ __forceinline__ void add(float4& to, const float4& v) {
    to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
  }

  // The first warpgroup: from sums to the product's output.
  __device__ __forceinline__ void finish(const ClusterLayer& l, const Place& p, const Share& s, const Parameters& r) {
    float4 v = {};
    if (s.valid) {
      v = collect(p, base + sums_at(0) + s.sum * 4);
      add(v, r.bias);
    }
    if (l.norm >= 0)
      modulate(l, p, s, r, v);
    else
      sync_group();
    arrive(p, thread, barriers.read[p.way]);
    if (!s.valid) {
      if (l.message < 0) tail(l, p, s, v);
      return;
    }
    if (l.add) add(v, residual_of(thread));
    if (l.keep) residual_of(thread) = v;
    if (l.message >= 0)
      publish(l, p, s, v);
    else
      tail(l, p, s, v);
  }

  // The second warpgroup: the residual's sums; and what has been read is made unwritten again.
  __device__ __forceinline__ void finish_residual(const ClusterLayer& l, const Place& p, const Share& s) const {
    if (s.valid) {
      float4 v = collect(p, base + sums_at(1) + s.sum * 4);
      add(v, fetch(a.floats + l.bias[1] + s.channel));
      residual_of(thread) = v;
    }
    sync_group();
    arrive(p, thread, barriers.residual_read[p.way]);
  }
  __device__ __forceinline__ void reset(const ClusterLayer& l, bool tail) const {
    for (uint64_t left = l.resets; left; left &= left - 1) {
      const ClusterLayer& old = layers[__ffsll(static_cast<long long>(left)) - 1];
      const Place p(old, cluster, rank);
      const Share s(old, p, thread);
      if (s.valid)
        ptx::store_message_8(a.messages + old.message + s.word(old, p, a.layout.chunk_log2),
                             make_uint2(kUnwritten, kUnwritten));
    }
    if (tail) {
      const ClusterLayer& last = layers[a.layout.count];
      const Place p(last, cluster, rank);
      const Share s(last, p, thread);
      if (s.valid && (thread & ((1 << last.quads_log2) - 1)) == 0)
        for (int d = 0; d < a.actions; d++) ptx::store_message_word(tail_word(last, s, d), kUnwritten);
    }
    __threadfence();
  }

  // A group's part of an action, as a message: (sample, group, time, action).
  __device__ __forceinline__ uint32_t* tail_word(const ClusterLayer& l, const Share& s, int d) const {
    const int which = s.channel >> (l.quads_log2 + 2);
    return reinterpret_cast<uint32_t*>(a.messages + a.layout.tail_message) +
           ((s.sample * kFinalGroups + which) * a.horizon + s.time) * a.actions + d;
  }
  __device__ __forceinline__ void tail(const ClusterLayer& l, const Place&, const Share& s, const float4& v) const {
    for (int d = 0; d < a.actions; d++) {
      float part = 0.0f;
      if (s.valid) {
        const float4 w = *reinterpret_cast<const float4*>(a.floats + a.tail.weights + d * l.channels + s.channel);
        part = fmaf(v.x, w.x, v.y * w.y) + fmaf(v.z, w.z, v.w * w.w);
      }
      for (int i = 1 << l.quads_log2 >> 1; i; i >>= 1) part += __shfl_xor_sync(~0u, part, i);
      if (s.valid && (thread & ((1 << l.quads_log2) - 1)) == 0)
        ptx::store_message_word(tail_word(l, s, d), min(__float_as_uint(part), kUnwritten - 1));
    }
  }

  __device__ __forceinline__ float inpaint(float x, int64_t i) const { return a.mask && a.mask[i] ? a.known[i] : x; }

  // The sample after step `step - 1`, from the groups' parts; every block that needs a sample computes it.
  __device__ void advance_sample(const Share& s) const {
    float* x = reinterpret_cast<float*>(shared + a.layout.sample);
    const int count = a.horizon * a.actions;
    if (s.sample >= a.samples) {  // only fills the chunk up
      for (int i = tid; i < count; i += kComputeThreads) x[i] = 0.0f;
      return;
    }
    const int64_t first = static_cast<int64_t>(a.first_sample + s.sample) * count;
    const auto* words = reinterpret_cast<const uint32_t*>(a.messages + a.layout.tail_message) +
                        static_cast<int64_t>(s.sample) * kFinalGroups * count;
    for (int i = tid; i < count; i += kComputeThreads) {
      if (step == 0) {
        x[i] = inpaint(a.initial[first + i], first + i);
        continue;
      }
      const float noise = a.noise ? a.noise[static_cast<int64_t>(step - 1) * a.batch * count + first + i] : 0.0f;
      uint32_t word[kFinalGroups];
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int g = 0; g < kFinalGroups; g++) word[g] = ptx::load_message_word(words + g * count + i);
#pragma unroll
        for (int g = 0; g < kFinalGroups; g++) missing |= word[g] == kUnwritten;
      } while (missing);
      float output = a.floats[a.tail.bias + i % a.actions];
#pragma unroll
      for (int g = 0; g < kFinalGroups; g++) output += __uint_as_float(word[g]);
      if (a.table) {
        const math::SchedulerStep<float> rule(a.table, step - 1, a.clip, a.noise != nullptr);
        output = inpaint(rule.step(output, x[i], noise), first + i);
        x[i] = output;
      }
      if (step == a.steps && s.channel < 4) a.output[first + i] = output;
    }
  }

  // The first convolution and its residual, four channels a thread, from the sample itself.
  __device__ __forceinline__ void first_conv(const ClusterLayer& l, const Share& s, float4& v, float4& other) const {
    const float* x = reinterpret_cast<const float*>(shared + a.layout.sample);
    v = fetch(a.floats + l.bias[0] + s.channel), other = fetch(a.floats + l.bias[1] + s.channel);
    auto accumulate = [&](float4& to, const float* w, const float* row) {
      for (int d = 0; d < a.actions; d++) {
        const float4 k = *reinterpret_cast<const float4*>(w + d * l.channels);
        to.x = fmaf(k.x, row[d], to.x), to.y = fmaf(k.y, row[d], to.y);
        to.z = fmaf(k.z, row[d], to.z), to.w = fmaf(k.w, row[d], to.w);
      }
    };
    for (int tap = 0; tap < a.taps; tap++) {
      const int t = s.time + tap - a.taps / 2;
      if (t >= 0 && t < a.horizon)
        accumulate(v, a.floats + a.head.weights + tap * a.actions * l.channels + s.channel, x + t * a.actions);
    }
    accumulate(other, a.floats + a.head.residual + s.channel, x + s.time * a.actions);
  }

  // Between two steps, and before the first and after the last one.
  __device__ void ends() {
    const ClusterLayer& l = layers[0];
    const Place p(l, cluster, rank);
    const Share s(l, p, thread);
    const bool mine = p.finisher * l.share_units < l.units;
    const bool runs = step < a.steps;
    Parameters r = {};
    if (runs && group == 0) r = fetch_parameters(l, s);
    if (mine) advance_sample(Share(l, p, 0));
    sync_all();
    if (!runs || group > 0) return;
    float4 v = {}, other = {};
    if (s.valid) first_conv(l, s, v, other);
    modulate(l, p, s, r, v);
    if (!s.valid) return;
    residual_of(thread) = other;
    publish(l, p, s, v);
  }

  __device__ void layer(int i) {
    const ClusterLayer& l = layers[i];
    const Place p(l, cluster, rank);
    const bool residual = l.num_segments == 2 && !l.upsample;
    prefetch_film(l, p);
    receive(l, p);
    sync_all();
    switch (uniform(l.columns_log2)) {
      case 6: product<64>(l, p, residual); break;
      case 5: product<32>(l, p, residual); break;
      default: product<16>(l, p, residual);
    }
    const Share s(l, p, thread);
    Parameters r = {};
    if (group == 0) r = fetch_parameters(l, s);
    sync_all();
    arrive(p, tid, barriers.ready[p.way]);
    wait_phase(barriers.ready[p.way], kReady + p.way);
    may_be_late_here();
    if (group == 0) {
      finish(l, p, s, r);
    } else {
      if (residual) finish_residual(l, p, s);
      reset(l, i == 1);
    }
    unread = p.way, unread_residual = residual ? p.way : -1;
  }

  __device__ void run() {
    for (step = 0; step < a.steps; step++) {
      ends();
      for (int i = 1; i <= a.layout.count; i++) layer(i);
    }
    ends();
  }
};

}  // namespace dpa::kernels::unet1d
