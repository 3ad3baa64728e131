// The GEMMs of the clustered kernel, by a warpgroup.
//
//   receive   the block's input words, as soon as they are written, into shared memory: [octet of channels][row][16
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

template <class Weight, bool kAlone>
struct ClusterGemm : ClusterRole {
  using Tile = unet1d::Tile<Weight>;
  using T = typename Tile::Activation;
  static constexpr int kStepBytes = 4 * Tile::kBytes, kStageBytes = kStageSteps * kStepBytes;
  const uint32_t full, empty;  // addresses of the circular buffer's first barriers
  PipelineState at;
  uint32_t ack_phase = 0;     // of barriers.sums_empty[lane]
  uint32_t pending_acks = 0;  // a bit a block: it must acknowledge the last sums before this one sends again

  __device__ explicit ClusterGemm(const ClusterRole& role)
      : ClusterRole(role),
        full(ptx::held(ptx::shared_address(barriers.full))),
        empty(ptx::held(ptx::shared_address(barriers.empty))) {}

  __device__ __forceinline__ void sync() const { ptx::sync_threads(1, kGroupThreads); }

  static __device__ __forceinline__ bool unwritten(const uint4& v) {
    return v.x == kUnwritten || v.y == kUnwritten || v.z == kUnwritten || v.w == kUnwritten;
  }

  __device__ __forceinline__ void receive(const ClusterLayer& l, const ClusterTile& p, bool first_of_step) {
    constexpr int kEach = kMaxWords / kGroupThreads;
    const int samples_log2 = l.samples_log2, times_log2 = l.times_in_log2, octets = l.octets, rows = l.rows;
    const int samples = 1 << samples_log2, times = 1 << times_log2, words = octets << (times_log2 + samples_log2);
    const int first = p.slice * l.slice_octets + p.half * l.half_octets;
    const uint8_t* from = messages_of(step) + l.source[p.half] +
                          ((static_cast<int64_t>(first) << (times_log2 + a.layout.chunk_log2)) + p.sample0) * 16;
    // Where a block has channels of the value and of the skip: from those to these.
    const int first_octets = kAlone ? l.first_octets : octets;
    const int64_t to_skip =
        l.source[1] - l.source[0] - (static_cast<int64_t>(first_octets) << (times_log2 + a.layout.chunk_log2)) * 16;
    uint8_t* to = shared + a.layout.activations;
    const bool strided = l.stride == 2;
    const int before = l.pad, zeros = before << samples_log2;
    uint4 v[kEach];
    int source[kEach], target[kEach];
    uint32_t behind = 0;  // a bit a word: of the skip
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int i = thread + e * kGroupThreads;
      const int s = i & (samples - 1), t = i >> samples_log2 & (times - 1), octet = i >> (samples_log2 + times_log2);
      source[e] = (i >> samples_log2 << a.layout.chunk_log2) + s;
      const int row = !strided ? t + before : (t & 1) ? t / 2 + 1 : times / 2 + 1 + t / 2;
      target[e] = octet * rows + (row << samples_log2) + s;
      if (kAlone && octet >= first_octets) behind |= 1u << e;
      v[e] = make_uint4(i < words ? kUnwritten : 0, 0, 0, 0);
    }
    sync();  // the last GEMM has read its input
    for (int octet = warp; octet <= octets; octet += kGroupThreads / 32)
      for (int i = lane; i < zeros; i += 32)
        *reinterpret_cast<uint4*>(to + (octet * rows + i) * 16) = make_uint4(0, 0, 0, 0);
    wait_for_acks(first_of_step);
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int e = 0; e < kEach; e++)
        if (unwritten(v[e]))
          v[e] = ptx::load_message_16(from + source[e] * 16 + (kAlone && behind >> e & 1 ? to_skip : 0));
#pragma unroll
      for (int e = 0; e < kEach; e++) missing |= unwritten(v[e]);
    } while (missing);
#pragma unroll
    for (int e = 0; e < kEach; e++)
      if (thread + e * kGroupThreads < words) *reinterpret_cast<uint4*>(to + target[e] * 16) = v[e];
    cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    sync();
  }

  // The weights of kSteps steps. Steps that only fill the last stage up have weights of zero.
  template <int kSteps>
  struct Part {
    uint4 weights[kSteps];

    __device__ __forceinline__ void load(uint32_t from, int steps) {
#pragma unroll
      for (int j = 0; j < kSteps; j++) {
        if constexpr (Tile::kBytes == 512)
          weights[j] = ptx::load_shared_16(from + j * kStepBytes);
        else
          weights[j] = Tile::widen_raw(ptx::load_shared_8(from + j * kStepBytes)).v;
      }
      if (steps >= kSteps) return;
#pragma unroll
      for (int j = 0; j < kSteps; j++)
        if (j >= steps) weights[j] = make_uint4(0, 0, 0, 0);
    }
  };
  // columns: where those of each step begin, 16 bits each.
  template <int kColumns, int kSteps>
  static __device__ __forceinline__ void multiply_part(const Part<kSteps>& from, uint32_t input,
                                                       const uint32_t (&columns)[kSteps / 2],
                                                       float (&sum)[kColumns / 2]) {
    wgmma::fence();
#pragma unroll
    for (int j = 0; j < kSteps; j++)
      wgmma::mma_rs<T, kColumns>(
          sum, from.weights[j], wgmma::unswizzled(input + (j & 1 ? columns[j / 2] >> 16 : columns[j / 2] & 0xFFFF), 0));
    wgmma::commit();
  }
  // The columns of a stage's steps, one stage after the other.
  struct Columns {
    const uint16_t* at;
    uint32_t apart;
    bool by_stage;
    __device__ __forceinline__ Columns(const ClusterLayer& l, int segment)
        : at(l.inputs + (segment ? kMaxInputs : 0)), apart(2 * l.rows), by_stage(kAlone && l.by_stage) {}
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
  // The GEMMs of one segment: while those of two steps run, the weights of the next two come to registers; where there
  // are few columns, and so registers for it, those of a stage.
  template <int kColumns>
  __device__ __forceinline__ void multiply(const ClusterLayer& l, int segment, int steps, float (&sum)[kColumns / 2]) {
    static_assert(kStageSteps == 4, "a stage of the circular buffer is two halves of two steps");
    if (steps == 0) return;
    const uint32_t tiles = base + a.layout.buffer + warp * Tile::kBytes + lane * Tile::kLaneBytes;
    const uint32_t input = static_cast<uint32_t>(wgmma::unswizzled(wgmma::units(base + a.layout.activations), l.rows));
    Columns columns(l, segment);
    const auto wait_for_stage = [&] { ptx::barrier_wait(full + at.stage * 8, at.phase); };
    const auto release_stage = [&] {
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(empty + at.stage * 8);
      at.advance(a.layout.stages);
    };
    if constexpr (kAlone && kColumns <= 32) {
      Part<4> even, odd;
#pragma unroll 1
      for (; steps > 0; steps -= 2 * kStageSteps) {
        uint2 four = columns.next();
        wait_for_stage();
        even.load(tiles + at.stage * kStageBytes, steps);
        release_stage();
        multiply_part<kColumns, 4>(even, input, {four.x, four.y}, sum);
        wgmma::wait<1>();
        const bool more = steps > kStageSteps;  // else the second stage's weights are zeros
        if (more) four = columns.next(), wait_for_stage();
        odd.load(tiles + at.stage * kStageBytes, steps - kStageSteps);
        if (more) release_stage();
        multiply_part<kColumns, 4>(odd, input, {four.x, four.y}, sum);
        wgmma::wait<1>();
      }
    } else {
      Part<2> even, odd;
      uint2 next = columns.next();
      wait_for_stage();
#pragma unroll 1
      for (; steps > 0; steps -= kStageSteps) {
        const uint32_t from = tiles + at.stage * kStageBytes;
        const uint2 here = next;
        even.load(from, steps);
        multiply_part<kColumns, 2>(even, input, {here.x}, sum);
        wgmma::wait<1>();
        odd.load(from + 2 * kStepBytes, steps - 2);
        multiply_part<kColumns, 2>(odd, input, {here.y}, sum);
        release_stage();
        if (steps > kStageSteps) next = columns.next(), wait_for_stage();
        wgmma::wait<1>();
      }
    }
    wgmma::wait<0>();
  }

  // A failed poll delays the words that it polls, and the weights: so no poll before the blocks to which this one sends
  // next have acknowledged the last sums, or, in a step's first GEMM, before the other warpgroup has begun the step.
  __device__ __forceinline__ void wait_for_acks(bool first_of_step) {
    if (pending_acks >> lane & 1) {
      ptx::barrier_wait(ptx::shared_address(&barriers.sums_empty[lane]), ack_phase);
      ack_phase ^= 1;
    }
    __syncwarp();
    if (first_of_step) ptx::sync_threads(kStepBegun, 2 * kGroupThreads);
  }

  // A thread has of the tile rows 16 warp + lane / 4 and 8 more; of column tile i, columns 2 (lane % 4) and the next.
  // Columns are samples of a time, then of the next. So a thread has, of kSamples samples, every column tile of
  // kSamples / 2: times that it sends in pairs; of one sample on its own, neighbouring times. Where they go:
  template <int kSamples>
  struct Targets {
    uint32_t sums[kSamples], barrier[kSamples];
  };
  template <int kSamples>
  __device__ __forceinline__ Targets<kSamples> targets(const ClusterLayer& l, const ClusterTile& p, int which) const {
    Targets<kSamples> to;
    const int samples_log2 = l.samples_log2, q = lane & 3,
              row = warp * 16 + (l.paired ? (p.row_tile & 1) * kTileRows : 0);
    const int tile = row >> 4 & ((1 << (l.rows_log2 - 4)) - 1), of_tile = l.paired ? 0 : row >> l.rows_log2;
    const int first_pair = (kSamples > 2 ? 0 : kSamples == 1 ? q : q >> (samples_log2 - 1)) << l.pair_steps_log2;
    const uint32_t landing = base + a.layout.sums + which * a.layout.sums_bytes + p.part * l.pitch;
    const uint32_t barrier = ptx::shared_address(&barriers.sums_full[which]);
#pragma unroll
    for (int k = 0; k < kSamples; k++) {
      const int sample = kSamples == 1  ? 0
                         : kSamples > 2 ? 8 * (k >> 1) + 2 * q + (k & 1)
                                        : (2 * q & ((1 << samples_log2) - 1)) + (k & 1);
      const int share = ThreadShare::share(l, (sample << l.group_log2) + of_tile, tile, first_pair);
      const int peer = p.first_peer + (share >> l.shares_log2), n = ThreadShare::thread(l, share, lane >> 2);
      to.sums[k] = ptx::cluster_address(landing + n * 8, peer), to.barrier[k] = ptx::cluster_address(barrier, peer);
    }
    return to;
  }
  // Pairs of times follow one another in threads side by side; after four of them, 32 threads on.
  template <int kColumns, int kSamples>
  __device__ __forceinline__ void send(const Targets<kSamples>& to, const float (&sum)[kColumns / 2]) const {
    constexpr int kTiles = kSamples / 2, kPairs = kSamples == 1 ? kColumns / 8 : kColumns / 8 / kSamples;
    static_assert(kSamples == 1 || kPairs <= 4, "a thread's pairs of times are those of four threads side by side");
#pragma unroll
    for (int k = 0; k < kSamples; k++) {
      const int j = k & 1, first = k >> 1;
      uint2 words[kPairs];
#pragma unroll
      for (int m = 0; m < kPairs; m++) {
        const int early = kSamples == 1 ? 4 * m : (2 * m * kTiles + first) * 4 + j,
                  late = kSamples == 1 ? 4 * m + 1 : ((2 * m + 1) * kTiles + first) * 4 + j;
        words[m] = make_uint2(pack_pair<T>(sum[early], sum[late]), pack_pair<T>(sum[early + 2], sum[late + 2]));
      }
      if constexpr (kPairs == 1) ptx::send_cluster_8(to.sums[k], words[0], to.barrier[k]);
#pragma unroll
      for (int m = 0; m + 1 < kPairs; m += 2)
        ptx::send_cluster_16(to.sums[k] + (m >> 2) * 256 + (m & 3) * 8,
                             make_uint4(words[m].x, words[m].y, words[m + 1].x, words[m + 1].y), to.barrier[k]);
    }
  }

  // The GEMM of a segment, and its sums to those who finish them.
  template <int kColumns, int kSamples>
  __device__ __forceinline__ void gemm(const ClusterLayer& l, const ClusterTile& p, int segment,
                                       const Targets<kSamples>& to) {
    float2 scale = {1.0f, 1.0f};
    if constexpr (Tile::kBytes == 256) {
      const float* at = a.floats + l.scale[segment] + p.row_tile * kTileRows + warp * 16 + (lane >> 2);
      scale = {ptx::load_constant(at), ptx::load_constant(at + 8)};
    }
    float sum[kColumns / 2] = {};
    multiply<kColumns>(l, segment, uniform(l.steps[segment]), sum);
    if constexpr (Tile::kBytes == 256)
#pragma unroll
      for (int i = 0; i < kColumns / 2; i++) sum[i] *= i & 2 ? scale.y : scale.x;
    inject_test_delay();
    send<kColumns, kSamples>(to, sum);
  }
  template <int kColumns, int kSamples>
  __device__ __forceinline__ void gemm_of_samples(const ClusterLayer& l, const ClusterTile& p, int segment, int which) {
    gemm<kColumns, kSamples>(l, p, segment, targets<kSamples>(l, p, which));
  }
  __device__ __forceinline__ void gemm(const ClusterLayer& l, const ClusterTile& p, int segment, int which) {
    const bool many = l.samples_log2 == 4;
    switch (uniform(l.columns_log2 * 2 + many)) {
      case 13: gemm_of_samples<64, 4>(l, p, segment, which); break;
      case 12: gemm_of_samples<64, 2>(l, p, segment, which); break;
      case 11: gemm_of_samples<32, 4>(l, p, segment, which); break;
      case 10: gemm_of_samples<32, 2>(l, p, segment, which); break;
      default: gemm_of_samples<16, 2>(l, p, segment, which);
    }
  }
  __device__ __forceinline__ void gemm_alone(const ClusterLayer& l, const ClusterTile& p, int segment,
                                             const Targets<1>& to) {
    switch (uniform(l.columns_log2)) {
      case 6: gemm<64, 1>(l, p, segment, to); break;
      case 5: gemm<32, 1>(l, p, segment, to); break;
      default: gemm<16, 1>(l, p, segment, to);
    }
  }

  __device__ __forceinline__ void run() {
    for (; step < a.steps; step++) {
      for (int i = 1; i <= a.layout.count; i++) {
        const ClusterLayer& l = layers[i];
        const ClusterTile p(l, cluster, rank);
        Targets<1> to;
        if constexpr (kAlone) to = targets<1>(l, p, 0);  // before there is input
        receive(l, p, i == 1);
        // The residual convolution comes first: it is short.
        for (int which = has_residual(l); which >= 0; which--) {
          const int segment = l.upsample ? p.segment : which;
          if constexpr (kAlone)
            gemm_alone(l, p, segment, {{to.sums[0] + which * a.layout.sums_bytes}, {to.barrier[0] + which * 8}});
          else
            gemm(l, p, segment, which);
        }
        pending_acks = AckTargets(l, p).by;
      }
    }
  }
};

}  // namespace dpa::kernels::unet1d
