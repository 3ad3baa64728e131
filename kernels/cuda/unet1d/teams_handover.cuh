// How a team's blocks hand finished values over. In a cluster: stores into the shared memory of all eight, counted by a
// barrier there. By words: 32 bits a value through L2, each with its flag, the step's parity, in the lowest bit.
#pragma once
#include "kernels/cuda/unet1d/phases_input.cuh"
#include "kernels/cuda/unet1d/teams.h"

namespace dpa::kernels::unet1d::device {

// The numbers of a phase that a warp needs, read from shared memory before it waits.
struct SlabAt {
  int base, pitch, rows, padded, halo;  // of a value: see TeamPhase
};
DPA_DEVICE int slab_offset(const SlabAt& s, int sample, int time, int rank, int channel) {
  return s.base + (sample * s.rows + time + s.halo) * s.pitch + (rank * s.padded + channel) * 2;
}
#if defined(DPA_EMULATE) || __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
// Blocks of a cluster. Every phase is all-to-all, so a block is never more than one hand-over ahead of another: two
// barriers by turns, and two slabs by turns, are enough.
template <class Tile>
struct ClusterHandover {
  static constexpr bool kWords = false;
  uint32_t peers[kTeamBlocks];  // where a peer's shared memory begins in the cluster's window
  uint32_t barriers;            // address of two
  int count = 0;                // hand-overs so far

  DPA_DEVICE ClusterHandover(const TeamArguments&, int) : barriers(held(shared_address(block_barriers()))) {
    if (thread() == 0) barrier_init(block_barriers(), 2);
#pragma unroll
    for (int d = 0; d < kTeamBlocks; d++) peers[d] = held(peer_window(d));
  }
  DPA_DEVICE static void meet() { cluster_sync(); }
  DPA_DEVICE uint32_t barrier(int n) const { return barriers + (n & 1) * 8; }
  DPA_DEVICE void expect(int ahead, int bytes) const { barrier_expect(barrier(count + ahead), bytes); }

  // Where four channels of a time go, in every block; from a time to the next.
  DPA_DEVICE static uint32_t place(const TeamPhase&, const SlabAt& to, int sample, int time, int rank, int channel) {
    return shared_address(shared()) + slab_offset(to, sample, time, rank, channel);
  }
  DPA_DEVICE static int pitch(const TeamPhase& p) { return p.out_pitch; }
  DPA_DEVICE void send(uint32_t at, int pitch, uint32_t, const float (&v)[4]) const {
    const FourActivations<Tile> values(v);
    const uint32_t full = barrier(count);
#pragma unroll
    for (int d = 0; d < kTeamBlocks; d++) {
#pragma unroll
      for (int i = 0; i < values.kParts; i++)
        send_cluster_8(peers[d] + at + i * low_halves(pitch), values.part[i], peers[d] + full);
    }
  }
  DPA_DEVICE void send_tail(const TeamArguments& a, int at, uint32_t, float v) const {
    const uint32_t to = shared_address(shared()) + a.shared.tail_words + at * 4;
#pragma unroll
    for (int d = 0; d < kTeamBlocks; d++) send_cluster_4(peers[d] + to, bits(v), peers[d] + barrier(count));
  }
  // The values of a hand-over are here.
  DPA_DEVICE void wait() {
    barrier_wait(barrier(count), count >> 1 & 1);
    count++;
  }
  // After `wait`, by warps that multiply: arms the barrier again, for so many bytes.
  DPA_DEVICE void expect_next(int bytes) const {
    if (thread() == 0) expect(1, bytes);
  }
  DPA_DEVICE void sent() { count++; }
};
#endif

template <class Tile>
struct WordHandover {
  static constexpr bool kWords = true;
  uint32_t* words;  // of the team

  DPA_DEVICE WordHandover(const TeamArguments& a, int team)
      : words(a.workspace + kTeamFirstWord + static_cast<size_t>(team) * a.team_words) {}
  DPA_DEVICE static void meet() {}

  DPA_DEVICE static uint32_t place(const TeamPhase& p, const SlabAt&, int sample, int time, int rank, int channel) {
    return p.words + ((sample * p.times + time) * kTeamBlocks + rank) * p.channels + channel;
  }
  DPA_DEVICE static int pitch(const TeamPhase& p) { return kTeamBlocks * p.channels; }
  DPA_DEVICE void sent() {}
  DPA_DEVICE void send(uint32_t at, int, uint32_t flag, const float (&v)[4]) const {
    store_message_16(words + at, make_uint4((bits(v[0]) & ~1u) | flag, (bits(v[1]) & ~1u) | flag,
                                            (bits(v[2]) & ~1u) | flag, (bits(v[3]) & ~1u) | flag));
  }
  DPA_DEVICE void send_tail(const TeamArguments& a, int at, uint32_t flag, float v) const {
    store_message_word(words + a.tail_words + at, (bits(v) & ~1u) | flag);
  }
  // Polls the output of phase `p` and writes it to its slab, by the warps that multiply. A barrier is due before that is
  // read.
  DPA_DEVICE void receive(const TeamPhase& p, const SlabAt& to, int samples, uint32_t flag, Watch& watch) const {
    constexpr int kItems = 2;
    const int own = p.channels, quads = samples * p.times * own * kTeamBlocks / 4;
    const Divisor by_own = {own / 4, p.own_magic}, by_times = {p.times, p.times_magic};
#pragma unroll 1
    for (int base = thread(); base < quads; base += kItems * kThreads) {
      uint4 v[kItems];
      const uint32_t* from[kItems];
#pragma unroll
      for (int i = 0; i < kItems; i++) {
        const int at = base + i * kThreads;
        from[i] = words + p.words + (at < quads ? at : base) * 4;
      }
      poll(from, v, flag, watch);
#pragma unroll
      for (int i = 0; i < kItems; i++) {
        const int at = base + i * kThreads;
        if (at >= quads) continue;
        const int block = by_own(at), channel = (at - block * by_own.by) * 4, row = block >> 3, rank = block & 7;
        const int sample = by_times(row), time = row - sample * p.times;
        const float4 f = floats_of(v[i]);
        const float x[4] = {f.x, f.y, f.z, f.w};
        FourActivations<Tile>(x).store(shared() + slab_offset(to, sample, time, rank, channel), to.pitch);
      }
    }
  }
  DPA_DEVICE void receive_tail(const TeamArguments& a, int count, uint32_t flag, Watch& watch) const {
    uint32_t* to = reinterpret_cast<uint32_t*>(shared() + a.shared.tail_words);
    for (int i = thread() - kThreads; i < count; i += kTeamThreads - kThreads)
      to[i] = poll_word(words + a.tail_words + i, flag, watch);
  }
};

}  // namespace dpa::kernels::unet1d::device
