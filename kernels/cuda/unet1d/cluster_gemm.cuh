// The GEMMs of the clustered kernel, by a warpgroup.
//
//   receive   a pass's input words, as soon as they are written, into shared memory: [octet of channels][row][16
//             bytes], a row a (time, sample), samples fastest, with rows of zeros outside of the signal, which an octet
//             shares with the next. So the columns of a tap are the rows from tap * samples on, and no patch is ever
//             made. For stride 2 the odd times come first, then the even ones.
//   multiply  64 channels x all columns over this block's part of K, weights from the circular buffer; those in e4m3
//             are widened in registers, and their scales applied to the sums
//   send      partial sums in 16 bits to the blocks that finish their units, each to the place where the finishing
//             thread reads it: [block][thread][channel, channel + 8][two times]
#pragma once
#include "kernels/cuda/unet1d/cluster_block.cuh"

namespace dpa::kernels::unet1d {

template <class Weight, ClusterForm kForm>
struct ClusterGemm : ClusterRole {
  static constexpr bool kAlone = kForm == ClusterForm::kAlone, kPasses = in_passes(kForm);
  static constexpr int kSamples = kAlone ? 1 : 4;  // that a thread has of a tile, at most
  using Tile = unet1d::Tile<Weight>;
  using T = typename Tile::Activation;
  static constexpr int kStepBytes = 4 * Tile::kBytes, kStageBytes = kStageSteps * kStepBytes;
  const uint32_t full, empty;  // addresses of the circular buffer's first barriers
  PipelineState at;
  uint32_t ack_phases = 0;    // a bit each of barriers.sums_empty[0][lane], [1][lane]
  uint32_t pending_acks = 0;  // a bit a block: it must acknowledge the last sums before this one sends again
  uint32_t acks_apart = 0;    // a bit a block: whether on the second barrier

  __device__ explicit ClusterGemm(const ClusterRole& role)
      : ClusterRole(role),
        full(ptx::held(ptx::shared_address(barriers.full))),
        empty(ptx::held(ptx::shared_address(barriers.empty))) {}

  __device__ __forceinline__ void sync() const { ptx::sync_threads(1, kGroupThreads); }

  static __device__ __forceinline__ bool unwritten(const uint4& v) {
    return v.x == kUnwritten || v.y == kUnwritten || v.z == kUnwritten || v.w == kUnwritten;
  }

  // The words of a pass that a thread receives. They are whole octets apart, and so are their places.
  static constexpr int kEach = kMaxWords / kGroupThreads;
  struct Words {
    const uint8_t* from;
    int64_t to_skip;  // where a pass has channels of the value and of the skip: from those to these
    uint32_t behind;  // a bit a word: of the skip
    uint32_t apart, to, to_apart;
    int count;
    __device__ __forceinline__ const uint8_t* source(int e) const {
      return from + e * apart + (behind >> e & 1 ? to_skip : 0);
    }
    __device__ __forceinline__ uint32_t target(int e) const { return to + e * to_apart; }
  };
  __device__ __forceinline__ Words words(const ClusterLayer& l, const ClusterTile& p, int pass_of_block,
                                         int buffer) const {
    const ClusterPass pass(l, p, pass_of_block);
    const int samples_log2 = l.samples_log2, times_log2 = l.times_in_log2, columns_log2 = times_log2 + samples_log2,
              octet_log2 = times_log2 + a.layout.chunk_log2, first_octets = l.first_octets, rows = l.rows;
    const int s = thread & ((1 << samples_log2) - 1), t = thread >> samples_log2 & ((1 << times_log2) - 1),
              octet = thread >> columns_log2, apart = kGroupThreads >> columns_log2;
    const int row = l.stride != 2 ? t + l.pad : (t & 1) ? t / 2 + 1 : (1 << times_log2) / 2 + 1 + t / 2;
    Words w;
    w.from =
        messages_of(step) + l.source[pass.source] +
        ((static_cast<int64_t>(pass.octet + octet) << octet_log2) + (t << a.layout.chunk_log2) + p.sample0 + s) * 16;
    w.to_skip = l.source[1] - l.source[0] - (static_cast<int64_t>(first_octets) << octet_log2) * 16;
    w.behind = 0;
#pragma unroll
    for (int e = 0; e < kEach; e++)
      if (octet + e * apart >= first_octets) w.behind |= 1u << e;
    w.apart = apart << octet_log2 << 4, w.to_apart = apart * rows * 16;
    w.to = activations(buffer) + (octet * rows + (row << samples_log2) + s) * 16;
    w.count = ((l.octets << columns_log2) - thread + kGroupThreads - 1) / kGroupThreads;
    return w;
  }
  __device__ __forceinline__ uint32_t activations(int buffer) const {
    return base + a.layout.activations + buffer * a.layout.activation_bytes;
  }

  // The first pass of a GEMM, with the rows of zeros, which all passes share: polled until it is there.
  __device__ __forceinline__ void receive(const ClusterLayer& l, const ClusterTile& p, bool first_of_step) {
    const int zeros = l.pad << l.samples_log2, rows = l.rows, octets = l.octets;
    const Words w = words(l, p, 0, 0);
    uint4 v[kEach];
#pragma unroll
    for (int e = 0; e < kEach; e++) v[e] = make_uint4(e < w.count ? kUnwritten : 0, 0, 0, 0);
    sync();  // the last GEMM has read its input
    for (int octet = warp; octet <= octets; octet += kGroupThreads / 32)
      for (int i = lane; i < zeros; i += 32) {
        const uint32_t at = (octet * rows + i) * 16;
        ptx::store_shared_16(activations(0) + at, make_uint4(0, 0, 0, 0));
        if (kPasses && l.passes > 1) ptx::store_shared_16(activations(1) + at, make_uint4(0, 0, 0, 0));
      }
    wait_for_acks(first_of_step);
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int e = 0; e < kEach; e++)
        if (unwritten(v[e])) v[e] = ptx::load_message_16(w.source(e));
#pragma unroll
      for (int e = 0; e < kEach; e++) missing |= unwritten(v[e]);
    } while (missing);
#pragma unroll
    for (int e = 0; e < kEach; e++)
      if (e < w.count) ptx::store_shared_16(w.target(e), v[e]);
    cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    sync();
  }
  // A further pass comes by asynchronous copies while the last one is multiplied.
  __device__ __forceinline__ void request(const Words& w) const {
#pragma unroll
    for (int e = 0; e < kEach; e++)
      if (e < w.count) ptx::copy_async_16(w.target(e), w.source(e));
  }
  // Copies again what was not written yet.
  __device__ __forceinline__ void await(const Words& w) const {
    ptx::copy_async_wait();
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      if (e >= w.count) continue;
      uint4 v = ptx::load_shared_16(w.target(e));
      if (!unwritten(v)) continue;
      while (unwritten(v)) v = ptx::load_message_16(w.source(e));
      ptx::store_shared_16(w.target(e), v);
    }
    cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    sync();
  }

  // A lane's weights of a stage's steps, as they come from the circular buffer, and as an MMA takes them.
  struct Raw {
    typename Tile::Raw v[kStageSteps];
    __device__ __forceinline__ void load(uint32_t from) {
#pragma unroll
      for (int j = 0; j < kStageSteps; j++) v[j] = Tile::load_at(from + j * kStepBytes);
    }
  };
  struct Weights {
    uint4 v[kStageSteps];
    // Steps from `steps` on, which only fill the last stage up, have weights of zero.
    __device__ __forceinline__ void widen(const Raw& raw, int steps) {
#pragma unroll
      for (int j = 0; j < kStageSteps; j++) v[j] = Tile::widen_raw(raw.v[j]).v;
      if (steps >= kStageSteps) return;
#pragma unroll
      for (int j = 1; j < kStageSteps; j++)
        if (j >= steps) v[j] = make_uint4(0, 0, 0, 0);
    }
  };
  // The columns of a stage's steps, one stage after the other.
  struct Columns {
    const uint16_t* at;
    uint32_t apart;
    bool by_stage;
    __device__ __forceinline__ Columns(const ClusterLayer& l, int segment)
        : at(l.inputs + (segment ? kMaxInputs : 0)), apart(2 * l.rows), by_stage(l.by_stage) {}
    __device__ __forceinline__ uint2 next() {
      if (by_stage) {
        const uint32_t two = *at++ * 0x10001u + (apart << 16);
        return make_uint2(two, two + 2 * apart * 0x10001u);
      }
      const uint2 four = *reinterpret_cast<const uint2*>(at);
      at += kStageSteps;
      return four;
    }
  };
  // A tile's sums. Those of fewer than 64 columns come first.
  using Sums = float[kTileColumns / 2];
  template <int kColumns>
  static __device__ __forceinline__ float (&sums_of(Sums& sum))[kColumns / 2] {
    return reinterpret_cast<float(&)[kColumns / 2]>(sum);
  }
  template <int kColumns>
  static __device__ __forceinline__ void multiply_stage(const Weights& weights, const uint32_t (&from)[kStageSteps],
                                                        Sums& sum) {
    wgmma::fence();
#pragma unroll
    for (int j = 0; j < kStageSteps; j++)
      wgmma::mma_rs<T, kColumns>(sums_of<kColumns>(sum), weights.v[j], wgmma::unswizzled(from[j], 0));
    wgmma::commit();
  }
  // The GEMMs of one segment. A stage's weights come to registers while the MMAs of the last one run. One loop for all
  // widths: ptxas gives an MMA's registers to nothing else, and with a loop each it has too few and lets none overlap.
  __device__ __forceinline__ void multiply(const ClusterLayer& l, int columns_log2, int segment, int buffer,
                                           Sums& sum) {
    static_assert(kStageSteps == 4, "the columns of a stage's steps are two pairs");
    constexpr int kFirst = kAlone ? 4 : 6;  // the width that most steps have
    int steps = uniform(l.steps[segment]);
    const uint32_t tiles = base + a.layout.buffer + warp * Tile::kBytes + lane * Tile::kLaneBytes;
    const int stages = ptx::kept(a.layout.stages);
    const bool leads = __shfl_sync(~0u, lane, lane) == 0;  // by a shuffle: not from the thread's index for each stage
    const uint32_t input = static_cast<uint32_t>(wgmma::unswizzled(wgmma::units(activations(buffer)), l.rows));
    Columns columns(l, segment);
    Weights weights[2];
    uint2 here = {};
    const auto load_stage = [&](Weights& to) {
      here = columns.next();
      ptx::barrier_wait(full + at.stage * 8, at.phase);
      Raw raw;
      if constexpr (Tile::kBytes == 256) raw.load(tiles + at.stage * kStageBytes);
      wgmma::wait<1>();  // the MMAs that take what `to` has
      if constexpr (Tile::kBytes == 512) raw.load(tiles + at.stage * kStageBytes);
      to.widen(raw, steps);
    };
    // Behind the MMAs that take its weights: an arrival could overtake loads that nothing waits for.
    const auto release_stage = [&] {
      __syncwarp();
      if (leads) ptx::barrier_arrive(empty + at.stage * 8);
      at.advance(stages);
    };
    load_stage(weights[0]);
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32_t from[] = {input + (here.x & 0xFFFF), input + (here.x >> 16), input + (here.y & 0xFFFF),
                                 input + (here.y >> 16)};
        if (columns_log2 == kFirst)
          multiply_stage<1 << kFirst>(weights[i], from, sum);
        else if (columns_log2 == 5)
          multiply_stage<32>(weights[i], from, sum);
        else
          multiply_stage<kAlone ? 64 : 16>(weights[i], from, sum);
        release_stage();
        if ((steps -= kStageSteps) <= 0) return wgmma::wait<0>();
        load_stage(weights[i ^ 1]);
      }
    }
  }

  // A failed poll delays the words that it polls, and the weights: so no poll before the blocks to which this one sends
  // next have acknowledged the last sums, or, in a step's first GEMM, before the other warpgroup has begun the step.
  __device__ __forceinline__ void wait_for_acks(bool first_of_step) {
    if (pending_acks >> lane & 1) {
      const uint32_t apart = acks_apart >> lane & 1;
      ptx::barrier_wait(ptx::shared_address(&barriers.sums_empty[apart][lane]), ack_phases >> apart & 1);
      ack_phases ^= 1u << apart;
    }
    __syncwarp();
    if (first_of_step) ptx::sync_threads(kStepBegun, 2 * kGroupThreads);
  }

  // A thread has of the tile rows 16 warp + lane / 4 and 8 more; of column tile i, columns 2 (lane % 4) and the next.
  // Columns are samples of a time, then of the next. So a thread has, of kMine samples, every column tile of kMine / 2:
  // times that it sends in pairs; of one sample a tile, neighbouring times. Where they go:
  struct Targets {
    uint32_t at[kSamples];  // byte offsets in the finishing block's shared memory, its rank above
    __device__ __forceinline__ uint32_t offset(int k) const { return at[k] & 0xFFFFFF; }
    __device__ __forceinline__ int peer(int k) const { return at[k] >> 24; }
  };
  __device__ __forceinline__ Targets targets(const ClusterLayer& l, const ClusterTile& p, int which) const {
    Targets to;
    const int samples_log2 = l.samples_log2, q = lane & 3, span = (1 << l.span_log2) - 1,
              row = warp * 16 + (p.row_tile & span) * kTileRows;
    const int tile = row >> 4 & ((1 << (l.rows_log2 - 4)) - 1), of_tile = row >> l.rows_log2;
    const int column = 2 * q & ((1 << samples_log2) - 1);  // the first of the thread's samples
    const int first_pair = (samples_log2 == 0 ? q : 2 * q >> samples_log2) << l.pair_steps_log2;
    const uint32_t landing = a.layout.sums + which * a.layout.sums_bytes + p.part * l.pitch;
#pragma unroll
    for (int k = 0; k < kSamples; k++) {
      const int sample = (column + 8 * (k >> 1) + (k & 1)) & ((1 << samples_log2) - 1);
      const int share = ThreadShare::share(l, (sample << l.group_log2) + of_tile, tile, first_pair);
      const int peer = p.first_peer + (share >> l.shares_log2);
      to.at[k] = (landing + ThreadShare::place(l, share, lane >> 2) * 8) | peer << 24;
    }
    return to;
  }
  // Pairs of times follow one another in threads side by side; after four of them, 32 threads on.
  template <int kColumns, int kMine>
  __device__ __forceinline__ void send(const Targets& to, int which, const float (&sum)[kColumns / 2]) const {
    constexpr int kTiles = kMine / 2, kPairs = kMine == 1 ? kColumns / 8 : kColumns / 8 / kMine;
    static_assert(kMine == 1 || kPairs <= 4, "a thread's pairs of times are those of four threads side by side");
#pragma unroll
    for (int k = 0; k < kMine; k++) {
      const uint32_t sums = ptx::cluster_address(base + to.offset(k), to.peer(k)),
                     barrier = ptx::cluster_address(ptx::shared_address(&barriers.sums_full[which]), to.peer(k));
      const int j = k & 1, first = k >> 1;
      uint2 words[kPairs];
#pragma unroll
      for (int m = 0; m < kPairs; m++) {
        const int early = kMine == 1 ? 4 * m : (2 * m * kTiles + first) * 4 + j,
                  late = kMine == 1 ? 4 * m + 1 : ((2 * m + 1) * kTiles + first) * 4 + j;
        words[m] = make_uint2(pack_pair<T>(sum[early], sum[late]), pack_pair<T>(sum[early + 2], sum[late + 2]));
      }
      if constexpr (kPairs == 1) ptx::send_cluster_8(sums, words[0], barrier);
#pragma unroll
      for (int m = 0; m + 1 < kPairs; m += 2)
        ptx::send_cluster_16(sums + (m >> 2) * 256 + (m & 3) * 8,
                             make_uint4(words[m].x, words[m].y, words[m + 1].x, words[m + 1].y), barrier);
    }
  }

  // Of e4m3 weights: of the thread's rows. Loaded before the GEMM, for after it.
  __device__ __forceinline__ float2 fetch_scale(const ClusterLayer& l, const ClusterTile& p, int segment) const {
    if constexpr (Tile::kBytes != 256) return {1.0f, 1.0f};
    const float* at = a.floats + l.scale[segment] + p.row_tile * kTileRows + warp * 16 + (lane >> 2);
    return {ptx::load_constant(at), ptx::load_constant(at + 8)};
  }
  template <int kColumns>
  __device__ __forceinline__ void send_scaled(const ClusterLayer& l, const Targets& to, int which, const float2& scale,
                                              float (&sum)[kColumns / 2]) const {
    if constexpr (Tile::kBytes == 256)
#pragma unroll
      for (int i = 0; i < kColumns / 2; i++) sum[i] *= i & 2 ? scale.y : scale.x;
    inject_test_delay();
    if constexpr (kAlone) return send<kColumns, 1>(to, which, sum);
    const int samples_log2 = uniform(l.samples_log2);
    if constexpr (kColumns > 16)
      if (samples_log2 == 4) return send<kColumns, 4>(to, which, sum);
    if constexpr (kPasses)
      if (samples_log2 == 0) return send<kColumns, 1>(to, which, sum);
    send<kColumns, 2>(to, which, sum);
  }

  // The GEMMs of a layer, and their sums to those who finish them. A pass that is alone is received once for both.
  __device__ __forceinline__ void gemm(const ClusterLayer& l, const ClusterTile& p, bool first_of_step) {
    const int columns_log2 = uniform(l.columns_log2);
    auto to = targets(l, p, has_residual(l));  // before there is input
    const int passes = kPasses ? uniform(l.passes) : 1;
    receive(l, p, first_of_step);
    int buffer = 0;
    // The residual convolution comes first: it is short.
    for (int which = has_residual(l); which >= 0; which--) {
      const int segment = l.upsample ? p.segment : which;
      const float2 scale = fetch_scale(l, p, segment);
      Sums sum = {};
#pragma unroll 1
      for (int n = 0; n < passes; n++) {
        const int next = n + 1 < passes ? n + 1 : 0;  // after the residual's last, the first again
        const bool more = passes > 1 && (next > 0 || which > 0);
        Words w = {};
        if (more) w = words(l, p, next, buffer ^ 1), request(w);
        multiply(l, columns_log2, segment, buffer, sum);
        if (more) await(w), buffer ^= 1;
      }
      switch (columns_log2) {
        case 6: send_scaled<64>(l, to, which, scale, sum); break;
        case 5: send_scaled<32>(l, to, which, scale, sums_of<32>(sum)); break;
        default: send_scaled<16>(l, to, which, scale, sums_of<16>(sum));
      }
      if (which > 0) to = targets(l, p, 0);
    }
  }

  __device__ __forceinline__ void run() {
    for (; step < a.steps; step++) {
      for (int i = 1; i <= a.layout.count; i++) {
        const ClusterLayer& l = layers[i];
        const ClusterTile p(l, cluster, rank);
        gemm(l, p, i == 1);
        const AckTargets acks(l, p);
        pending_acks = acks.by, acks_apart = ~acks.sharers;
      }
    }
  }
};

}  // namespace dpa::kernels::unet1d
