// The GEMMs of the clustered kernel, by a warpgroup.
//
//   receive   the block's input words, as soon as they are written, into shared memory: [octet of channels][row][16
//             bytes], a row a (time, sample), samples fastest, with rows of zeros outside of the signal, which an octet
//             shares with the next. So the columns of a tap are the rows from tap * samples on, and no patch is ever
//             made. For stride 2 the odd times come first, then the even ones.
//   multiply  64 channels x all columns over this block's part of K, weights from the circular buffer
//   send      partial sums in 16 bits to the blocks that finish their units, each to the place where the finishing
//             thread reads it: [block][thread][channel, channel + 8][two times]
#pragma once
#include "kernels/cuda/unet1d/cluster_block.cuh"

namespace dpa::kernels::unet1d {

template <class T>
struct ClusterGemm : ClusterRole {
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
    const int half = p.way ? rank >> 3 : 0, first = (rank & 7) * l.slice_octets + half * l.half_octets;
    const uint8_t* from = messages_of(step) + (half ? l.source[1] : l.source[0]) +
                          ((static_cast<int64_t>(first) << (times_log2 + a.layout.chunk_log2)) + p.sample0) * 16;
    uint8_t* to = shared + a.layout.activations;
    const bool strided = l.stride == 2;
    const int before = l.pad, zeros = before << samples_log2;
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
        if (unwritten(v[e])) v[e] = ptx::load_message_16(from + source[e] * 16);
#pragma unroll
      for (int e = 0; e < kEach; e++) missing |= unwritten(v[e]);
    } while (missing);
#pragma unroll
    for (int e = 0; e < kEach; e++)
      if (thread + e * kGroupThreads < words) *reinterpret_cast<uint4*>(to + target[e] * 16) = v[e];
    cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    sync();
  }

  // The weights of two steps. Steps that only fill the last stage up have weights of zero.
  struct Half {
    uint4 weights[2];
  };
  static __device__ __forceinline__ void load_half(Half& to, uint32_t from, int steps) {
#pragma unroll
    for (int j = 0; j < 2; j++) to.weights[j] = ptx::load_shared_16(from + j * 2048);
    if (steps >= 2) return;
    to.weights[1] = make_uint4(0, 0, 0, 0);
    if (steps < 1) to.weights[0] = to.weights[1];
  }
  // columns: where those of each step begin, 16 bits each.
  template <int kColumns>
  static __device__ __forceinline__ void multiply_half(const Half& from, uint32_t input, uint32_t columns,
                                                       float (&sum)[kColumns / 2]) {
    wgmma::fence();
    wgmma::mma_rs<T, kColumns>(sum, from.weights[0], wgmma::unswizzled(input + (columns & 0xFFFF), 0));
    wgmma::mma_rs<T, kColumns>(sum, from.weights[1], wgmma::unswizzled(input + (columns >> 16), 0));
    wgmma::commit();
  }
  // The GEMMs of one segment: while those of two steps run, the weights of the next two come to registers.
  template <int kColumns>
  __device__ __forceinline__ void multiply(const ClusterLayer& l, int segment, int steps, float (&sum)[kColumns / 2]) {
    static_assert(kStageSteps == 4, "a stage of the circular buffer is two halves of two steps");
    if (steps == 0) return;
    const uint32_t tiles = base + a.layout.buffer + warp * 512 + lane * 16;
    const uint32_t input = static_cast<uint32_t>(wgmma::unswizzled(wgmma::units(base + a.layout.activations), l.rows));
    const auto* columns = reinterpret_cast<const uint2*>(l.inputs + (segment ? kMaxSteps : 0));
    Half even, odd;
    uint2 next = *columns;
    ptx::barrier_wait(full + at.stage * 8, at.phase);
#pragma unroll 1
    for (; steps > 0; steps -= kStageSteps) {
      const uint32_t from = tiles + at.stage * kClusterStageBytes, release = empty + at.stage * 8;
      const uint2 here = next;
      load_half(even, from, steps);
      multiply_half<kColumns>(even, input, here.x, sum);
      wgmma::wait<1>();
      load_half(odd, from + 2 * 2048, steps - 2);
      multiply_half<kColumns>(odd, input, here.y, sum);
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(release);
      at.advance(a.layout.stages);
      if (steps > kStageSteps) {
        next = *++columns;
        ptx::barrier_wait(full + at.stage * 8, at.phase);
      }
      wgmma::wait<1>();
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
  // kSamples / 2: times that it sends in pairs. Where they go:
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
    const int first_pair = (kSamples > 2 ? 0 : q >> (samples_log2 - 1)) << (l.pairs_log2 - l.gap_log2);
    const uint32_t landing = base + a.layout.sums + which * a.layout.sums_bytes + p.part * l.pitch;
    const uint32_t barrier = ptx::shared_address(&barriers.sums_full[which]);
#pragma unroll
    for (int k = 0; k < kSamples; k++) {
      const int sample = (kSamples > 2 ? 8 * (k >> 1) + 2 * q : 2 * q & ((1 << samples_log2) - 1)) + (k & 1);
      const int unit = (sample << l.group_log2) + of_tile, peer = p.first_peer + (unit >> l.share_log2);
      const int n = ThreadShare::thread(l, unit & ((1 << l.share_log2) - 1), tile, lane >> 2, first_pair);
      to.sums[k] = ptx::cluster_address(landing + n * 8, peer), to.barrier[k] = ptx::cluster_address(barrier, peer);
    }
    return to;
  }
  // Pairs of times follow one another in threads side by side; after four of them, 32 threads on.
  template <int kColumns, int kSamples>
  __device__ __forceinline__ void send(const Targets<kSamples>& to, const float (&sum)[kColumns / 2]) const {
    constexpr int kTiles = kSamples / 2, kPairs = kColumns / 16 / kTiles;
    static_assert(kPairs <= 4, "a thread's pairs of times are those of four threads side by side");
#pragma unroll
    for (int k = 0; k < kSamples; k++) {
      const int j = k & 1, first = k >> 1;
      uint2 words[kPairs];
#pragma unroll
      for (int m = 0; m < kPairs; m++) {
        const int early = (2 * m * kTiles + first) * 4 + j, late = ((2 * m + 1) * kTiles + first) * 4 + j;
        words[m] = make_uint2(pack_pair<T>(sum[early], sum[late]), pack_pair<T>(sum[early + 2], sum[late + 2]));
      }
      if constexpr (kPairs == 1) ptx::send_cluster_8(to.sums[k], words[0], to.barrier[k]);
#pragma unroll
      for (int m = 0; m + 1 < kPairs; m += 2)
        ptx::send_cluster_16(to.sums[k] + m * 8, make_uint4(words[m].x, words[m].y, words[m + 1].x, words[m + 1].y),
                             to.barrier[k]);
    }
  }

  // The GEMM of a segment, and its sums to those who finish them.
  template <int kColumns, int kSamples>
  __device__ __forceinline__ void gemm(const ClusterLayer& l, const ClusterTile& p, int segment, int which) {
    const Targets<kSamples> to = targets<kSamples>(l, p, which);
    float sum[kColumns / 2] = {};
    multiply<kColumns>(l, segment, uniform(l.steps[segment]), sum);
    inject_test_delay();
    send<kColumns, kSamples>(to, sum);
  }
  __device__ __forceinline__ void gemm(const ClusterLayer& l, const ClusterTile& p, int segment, int which) {
    const bool many = l.samples_log2 == 4;
    switch (uniform(l.columns_log2 * 2 + many)) {
      case 13: gemm<64, 4>(l, p, segment, which); break;
      case 12: gemm<64, 2>(l, p, segment, which); break;
      case 11: gemm<32, 4>(l, p, segment, which); break;
      case 10: gemm<32, 2>(l, p, segment, which); break;
      default: gemm<16, 2>(l, p, segment, which);
    }
  }

  __device__ __forceinline__ void run() {
    for (; step < a.steps; step++) {
      for (int i = 1; i <= a.layout.count; i++) {
        const ClusterLayer& l = layers[i];
        const ClusterTile p(l, cluster, rank);
        receive(l, p, i == 1);
        // The residual convolution comes first: it is short.
        for (int which = has_residual(l); which >= 0; which--) gemm(l, p, l.upsample ? p.segment : which, which);
        pending_acks = AckTargets(l, p).by;
      }
    }
  }
};

}  // namespace dpa::kernels::unet1d
