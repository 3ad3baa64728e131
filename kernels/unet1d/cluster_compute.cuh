// The arithmetic warps of the clustered kernel, two warpgroups.
//
// The first, for each product:
//   receive   the block's input words, as soon as they are written, into shared memory: [octet of channels][row][16
//             bytes], a row a (time, sample), samples fastest, with rows of zeros outside of the signal. So the columns
//             of a tap are the rows from tap * samples on, and no patch is ever made. For stride 2 the odd times
//             come first, then the even ones.
//   multiply  64 channels x all columns over this block's part of K, weights from the ring
//   sums      to shared memory, [column][channel], for the blocks that share the tile
//   and then collects the residual's sums, where there are any, and makes unwritten what has been read.
// The second, meanwhile, fetches parameters (or multiplies the residual convolution), and then:
//   collect   the sums of its units from the blocks that share the tile, four channels of one (sample, time) a thread
//   finish    bias, GroupNorm, Mish, FiLM, residual; written as messages
// and between two steps the end of one and the beginning of the next.
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
  const int group, thread, warp, lane;  // thread, warp: in the warpgroup
  const uint32_t base, full, empty;     // addresses: of shared memory, of the ring's first barriers
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
        group(uniform(threadIdx.x / kGroupThreads)),
        thread(threadIdx.x % kGroupThreads),
        warp(uniform(thread / 32)),
        lane(threadIdx.x % 32),
        base(ptx::held(ptx::shared_address(memory))),
        full(ptx::held(ptx::shared_address(b.full))),
        empty(ptx::held(ptx::shared_address(b.empty))) {}

  enum Phase { kReady, kRead = 2, kResidualRead = 4, kMoments = 6 };
  __device__ __forceinline__ void wait_phase(uint64_t& barrier, int phase) {
    ptx::barrier_wait(ptx::shared_address(&barrier), phases >> phase & 1);
    phases ^= 1u << phase;
  }
  // Those who receive and multiply; those who finish.
  __device__ __forceinline__ void sync_receivers(bool residual) const {
    residual ? ptx::sync_threads(1, kComputeThreads) : ptx::sync_threads(2, kGroupThreads);
  }
  __device__ __forceinline__ void sync_finishers() const { ptx::sync_threads(3, kGroupThreads); }
  // A thread for each block that shares the tile.
  __device__ __forceinline__ void arrive(const Place& p, int i, uint64_t& barrier) const {
    if (i < 8 << p.way)
      ptx::barrier_arrive_cluster(ptx::cluster_address(ptx::shared_address(&barrier), p.first_peer + i));
  }
  static __device__ __forceinline__ bool unwritten(const uint4& v) {
    return v.x == kUnwritten || v.y == kUnwritten || v.z == kUnwritten || v.w == kUnwritten;
  }

  __device__ __forceinline__ void receive(const ClusterLayer& l, const Place& p) {
    constexpr int kEach = kMaxWords / kGroupThreads;
    const int samples_log2 = l.samples_log2, times_log2 = l.times_in_log2, octets = l.octets, rows = l.rows;
    const int samples = 1 << samples_log2, times = 1 << times_log2, words = octets << (times_log2 + samples_log2);
    const int half = p.way ? rank >> 3 : 0, first = (rank & 7) * l.slice_octets + half * l.half_octets;
    const uint8_t* from = a.messages + (half ? l.source[1] : l.source[0]) +
                          ((static_cast<int64_t>(first) << (times_log2 + a.layout.chunk_log2)) + p.sample0) * 16;
    uint8_t* to = shared + a.layout.activations;
    const bool strided = l.stride == 2;
    const int before = l.pad, pad = before << samples_log2, pads = strided ? pad : 2 * pad, back = rows - pads;
    uint4 v[kEach];
    int source[kEach], target[kEach];
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int i = thread + e * kGroupThreads;
      const int s = i & (samples - 1), t = i >> samples_log2 & (times - 1), octet = i >> (samples_log2 + times_log2);
      source[e] = (i >> samples_log2 << a.layout.chunk_log2) + s;
      const int row = !strided ? t + before : (t & 1) ? t / 2 + 1 : times / 2 + 1 + t / 2;
      target[e] = octet * rows + (row << samples_log2) + s;
      v[e] = make_uint4(i < words ? kUnwritten : 0, 0, 0, 0);
    }
    if (unread >= 0) wait_phase(barriers.read[unread], kRead + unread);
    if (unread_residual >= 0) wait_phase(barriers.residual_read[unread_residual], kResidualRead + unread_residual);
    for (int octet = warp; octet < octets; octet += kGroupThreads / 32)
      for (int i = lane; i < pads; i += 32)
        *reinterpret_cast<uint4*>(to + (octet * rows + (i < pad ? i : i + back)) * 16) = make_uint4(0, 0, 0, 0);
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int e = 0; e < kEach; e++)
        if (unwritten(v[e])) v[e] = ptx::load_message_16(from + source[e] * 16);
#pragma unroll
      for (int e = 0; e < kEach; e++) missing |= unwritten(v[e]);
    } while (missing);
#pragma unroll
    for (int e = 0; e < kEach; e++)
      if (thread + e * kGroupThreads < words) *reinterpret_cast<uint4*>(to + target[e] * 16) = v[e];
    ptx::async_proxy_fence();
  }

  // A stage of the ring in registers: the weights of four steps, and where their columns begin, 16 bits each.
  struct Stage {
    uint4 weights[kRingSteps];
    uint2 inputs;
  };
  // Steps that only fill the last stage up have weights of zero.
  __device__ __forceinline__ void load_stage(Stage& to, uint32_t tiles, const uint16_t* inputs, int steps) {
    ptx::barrier_wait(full + at.stage * 8, at.parity);
    const uint32_t from = tiles + at.stage * kRingStageBytes;
#pragma unroll
    for (int j = 0; j < kRingSteps; j++) to.weights[j] = ptx::load_shared_16(from + j * 2048);
    to.inputs = *reinterpret_cast<const uint2*>(inputs);
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(empty + at.stage * 8);
    if (++at.stage == a.layout.stages) at.stage = 0, at.parity ^= 1;
    if (steps >= kRingSteps) return;
#pragma unroll
    for (int j = 1; j < kRingSteps; j++)
      if (j >= steps) to.weights[j] = make_uint4(0, 0, 0, 0);
  }
  template <int kColumns>
  __device__ __forceinline__ void multiply_stage(const Stage& from, uint32_t input, float (&sum)[kColumns / 2]) {
    const uint32_t at[kRingSteps] = {from.inputs.x & 0xFFFF, from.inputs.x >> 16, from.inputs.y & 0xFFFF,
                                     from.inputs.y >> 16};
    wgmma::fence();
#pragma unroll
    for (int j = 0; j < kRingSteps; j++)
      wgmma::multiply<T, kColumns>(sum, from.weights[j], wgmma::describe(input + at[j], 0));
    wgmma::commit();
  }
  // The products of one segment: the next stage's weights come to registers while this one's products run.
  template <int kColumns>
  __device__ __forceinline__ void multiply(const ClusterLayer& l, int segment, int steps, float (&sum)[kColumns / 2]) {
    const uint32_t tiles = base + a.layout.ring + warp * 512 + lane * 16;
    const uint32_t input = static_cast<uint32_t>(wgmma::describe(wgmma::units(base + a.layout.activations), l.rows));
    const uint16_t* inputs = l.inputs + (segment ? kMaxSteps : 0);
#pragma unroll 1
    for (; steps > 0; steps -= kRingSteps, inputs += kRingSteps) {
      Stage stage;
      load_stage(stage, tiles, inputs, steps);
      multiply_stage<kColumns>(stage, input, sum);
      wgmma::wait<0>();
    }
  }

  __device__ __forceinline__ uint32_t sums_at(int which) const {
    return a.layout.activations + which * (kTileColumns * kSumsPitch * 4);
  }

  // This warpgroup's product, and its sums to shared memory. Where there is a residual both warpgroups call.
  template <int kColumns>
  __device__ __forceinline__ void product(const ClusterLayer& l, int segment, bool residual) {
    float sum[kColumns / 2] = {};
    multiply<kColumns>(l, segment, uniform(l.steps[segment]), sum);
    may_be_late_here();
    sync_receivers(residual);  // the activations make way
    float* to = reinterpret_cast<float*>(shared + sums_at(group)) + lane % 4 * 2 * kSumsPitch + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kColumns / 8; i++) {
      float* column = to + i * 8 * kSumsPitch;
      column[0] = sum[i * 4], column[kSumsPitch] = sum[i * 4 + 1];
      column[8] = sum[i * 4 + 2], column[kSumsPitch + 8] = sum[i * 4 + 3];
    }
    sync_receivers(residual);
  }
  __device__ __forceinline__ void product(const ClusterLayer& l, int segment, bool residual) {
    switch (uniform(l.columns_log2)) {
      case 6: product<64>(l, segment, residual); break;
      case 5: product<32>(l, segment, residual); break;
      default: product<16>(l, segment, residual);
    }
  }

  // The sum, in the order of their ranks, of what the blocks that share the tile hold.
  __device__ __forceinline__ float4 collect(const Place& p, int which, int sum) const {
    const uint32_t address = base + sums_at(which) + sum * 4;
    float4 total = {};
    for (int first = 0; first < 8 << p.way; first += 8) {
      float4 part[8];
#pragma unroll
      for (int i = 0; i < 8; i++)
        part[i] = ptx::load_cluster_16(ptx::cluster_address(address, p.first_peer + first + i));
#pragma unroll
      for (int i = 0; i < 8; i++) add(total, part[i]);
    }
    return total;
  }
  static __device__ __forceinline__ void add(float4& to, const float4& v) {
    to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
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
  // Asks for what it takes to finish a product, long before the sums are there.
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

  // Mean and inverse deviation of the thread's unit. The whole warpgroup calls, and meets.
  __device__ __forceinline__ float2 moments(const ClusterLayer& l, const Place&, const Share& s, const float4& v) {
    float sum = (v.x + v.y) + (v.z + v.w), squares = fmaf(v.x, v.x, v.y * v.y) + fmaf(v.z, v.z, v.w * v.w);
#pragma unroll
    for (int i = 16; i; i >>= 1) {
      sum += __shfl_xor_sync(~0u, sum, i);
      squares += __shfl_xor_sync(~0u, squares, i);
    }
    if (lane == 0) sums[warp] = make_float2(sum, squares);
    sync_finishers();
    const int warps = 1 << (l.unit_threads_log2 - 5), unit = s.unit;
    auto of_unit = [&](int u) {
      float2 total = {};
      for (int w = 0; w < warps; w++) total.x += sums[u * warps + w].x, total.y += sums[u * warps + w].y;
      return total;
    };
    float2 total = of_unit(unit);
    if (l.paired) {
      const int peer = rank ^ 8;
      const uint32_t barrier = ptx::shared_address(&barriers.moments);
      if (thread == 0) ptx::barrier_expect(barrier, 8 * l.share_units);
      if (thread < l.share_units)
        ptx::send_cluster_8(ptx::cluster_address(ptx::shared_address(&others[thread]), peer), of_unit(thread),
                            ptx::cluster_address(barrier, peer));
      wait_phase(barriers.moments, kMoments);
      const float2 other = others[min(unit, l.share_units - 1)];
      total.x += other.x, total.y += other.y;
    }
    const float mean = total.x * l.inverse_count;
    return make_float2(mean, rsqrtf(fmaxf(fmaf(-mean, mean, total.y * l.inverse_count), 0.0f) + 1e-5f));
  }

  // Bias is in `v` already. The whole second warpgroup calls.
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

  // From sums to the product's output.
  __device__ __forceinline__ void finish(const ClusterLayer& l, const Place& p, const Share& s, const Parameters& r) {
    float4 v = {};
    if (s.valid) {
      v = collect(p, 0, s.sum);
      add(v, r.bias);
    }
    if (l.norm >= 0)
      modulate(l, p, s, r, v);
    else
      sync_finishers();
    if (s.valid) {
      if (l.add) add(v, residual_of(thread));
      if (l.keep) residual_of(thread) = v;
      if (l.message >= 0) publish(l, p, s, v);
    }
    if (l.message < 0) tail(l, s, v);
    arrive(p, thread, barriers.read[p.way]);
  }

  // The residual's sums, which nothing but the next product's finish needs.
  __device__ __forceinline__ void keep_residual(const ClusterLayer& l, const Place& p) const {
    const Share s(l, p, thread);
    if (s.valid) {
      float4 v = collect(p, 1, s.sum);
      add(v, fetch(a.floats + l.bias[1] + s.channel));
      residual_of(thread) = v;
    }
    sync_receivers(false);
    arrive(p, thread, barriers.residual_read[p.way]);
  }
  // Makes unwritten what all readers have read.
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
  __device__ __forceinline__ void tail(const ClusterLayer& l, const Share& s, const float4& v) const {
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
  __device__ __forceinline__ void advance_sample(const Share& s) const {
    float* x = reinterpret_cast<float*>(shared + a.layout.sample);
    const int count = a.horizon * a.actions;
    if (s.sample >= a.samples) {  // only fills the chunk up
      for (int i = thread; i < count; i += kGroupThreads) x[i] = 0.0f;
      return;
    }
    const int64_t first = static_cast<int64_t>(a.first_sample + s.sample) * count;
    const auto* words = reinterpret_cast<const uint32_t*>(a.messages + a.layout.tail_message) +
                        static_cast<int64_t>(s.sample) * kFinalGroups * count;
    for (int i = thread; i < count; i += kGroupThreads) {
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
  __device__ __forceinline__ void ends() {
    const ClusterLayer& l = layers[0];
    const Place p(l, cluster, rank);
    const Share s(l, p, thread);
    Parameters r = {};
    if (step < a.steps) r = fetch_parameters(l, s);
    if (p.finisher * l.share_units < l.units) advance_sample(Share(l, p, 0));
    sync_finishers();
    if (step == a.steps) return;
    float4 v = {}, other = {};
    if (s.valid) first_conv(l, s, v, other);
    modulate(l, p, s, r, v);
    if (!s.valid) return;
    residual_of(thread) = other;
    publish(l, p, s, v);
  }

  __device__ __forceinline__ void layer(int i) {
    const ClusterLayer& l = layers[i];
    const Place p(l, cluster, rank);
    const int main = l.upsample ? p.segment : 0;
    const bool residual = uniform(l.num_segments == 2 && !l.upsample);
    if (group == 0) {
      receive(l, p);
      if (residual) at.advance(stages_of(l.steps[1]), a.layout.stages);
    }
    if (group == 0 || residual) {
      sync_receivers(residual);
      product(l, group == 0 ? main : 1, residual);
    }
    if (group == 0) {
      arrive(p, thread, barriers.ready[p.way]);
      wait_phase(barriers.ready[p.way], kReady + p.way);
      if (residual) keep_residual(l, p);
      reset(l, i == 1);
      unread = p.way, unread_residual = residual ? p.way : -1;
    } else {
      at.advance(stages_of(l.steps[main]), a.layout.stages);
      const Share s(l, p, thread);
      const Parameters r = fetch_parameters(l, s);
      wait_phase(barriers.ready[p.way], kReady + p.way);
      may_be_late_here();
      finish(l, p, s, r);
    }
  }

  __device__ __forceinline__ void run() {
    for (; step < a.steps; step++) {
      if (group > 0) ends();
      for (int i = 1; i <= a.layout.count; i++) layer(i);
    }
    if (group > 0) ends();
  }
};

}  // namespace dpa::kernels::unet1d
