// The instructions of phases_device.cuh on the host: every thread of a grid is a fiber, scheduled in random order.
// Asynchronous copies happen when they are waited for, not before; a warp's instructions wait for all its lanes.
#pragma once
#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/math/two_halves.h"

#define DPA_DEVICE inline
#define DPA_OUTLINE inline

namespace dpa::kernels::unet1d::device {

using std::max, std::min;

struct Copy {
  uint32_t to;
  const uint8_t* from;  // zeros if null
  int bytes;
};
struct WarpState {
  int arrived = 0, generation = 0;
  uint32_t in[32][12];
  uint32_t out[32][4];
};
struct Barrier {
  int pending = 1, phase = 0;
  long bytes = 0;
  void complete() {
    if (pending == 0 && bytes == 0) pending = 1, phase ^= 1;
  }
};
// A store into a peer's memory, under way.
struct Store {
  int block;
  uint32_t to, barrier;
  int bytes;
  uint32_t words[4];
};
// A barrier of threads: kMeetings of a block, the first of all its threads.
struct Meeting {
  int arrived = 0, generation = 0;
  void arrive(int count) {
    if (++arrived > count) std::printf("a barrier of too few threads\n"), std::abort();
    if (arrived == count) arrived = 0, generation++;
  }
};
constexpr int kMeetings = 16, kMostWarps = 16;
struct BlockState {
  std::vector<uint8_t> memory;
  Barrier barriers[2];
  Meeting meetings[kMeetings];
  WarpState warps[kMostWarps];
};
struct Fiber {
  ucontext_t context;  // of its beginning; later it goes on by a jump, because swapcontext calls the system
  jmp_buf resume;
  bool begun = false;
  const int* watched = nullptr;  // it waits while this has the value `seen`
  int seen = 0;
  std::vector<uint8_t> stack;
  int thread, block;
  bool done = false;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
};
struct Machine {
  int blocks = 0, threads = 0;  // threads: of a block
  std::vector<BlockState> state;
  std::vector<Fiber> fibers;
  std::vector<Store> stores;
  std::vector<int> cluster_arrived, cluster_generation;
  Fiber* now = nullptr;
  jmp_buf scheduler;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
};
inline Machine machine;

inline void yield() {
  if (_setjmp(machine.now->resume) == 0) _longjmp(machine.scheduler, 1);
}
// The scheduler passes over the fiber meanwhile.
inline void wait_while(const int& watched, int seen) {
  machine.now->watched = &watched, machine.now->seen = seen;
  while (watched == seen) yield();
  machine.now->watched = nullptr;
}
// Until the fiber yields.
inline void go_on(Fiber& f) {
  machine.now = &f;
  if (_setjmp(machine.scheduler) != 0) return;
  if (f.begun) _longjmp(f.resume, 1);
  f.begun = true;
  setcontext(&f.context);
}
inline BlockState& here() { return machine.state[machine.now->block]; }
DPA_DEVICE uint8_t* shared() { return here().memory.data(); }
DPA_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - here().memory.data());
}
DPA_DEVICE int thread() { return machine.now->thread; }
DPA_DEVICE int block() { return machine.now->block; }
DPA_DEVICE int blocks() { return machine.blocks; }
DPA_DEVICE long long clock_now() { return 0; }
DPA_DEVICE void pause() { yield(); }
DPA_DEVICE void arrive_threads(int id, int threads) { here().meetings[id].arrive(threads); }
DPA_DEVICE void sync_threads(int id, int threads) {
  Meeting& m = here().meetings[id];
  const int mine = m.generation;
  m.arrive(threads);
  wait_while(m.generation, mine);
}
DPA_DEVICE void sync_block() { sync_threads(0, machine.threads); }
// The last lane to come computes.
template <class F>
void collective(F f) {
  WarpState& w = here().warps[thread() >> 5];
  const int mine = w.generation;
  if (++w.arrived == 32) {
    w.arrived = 0;
    f(w);
    w.generation++;
  }
  wait_while(w.generation, mine);
}
DPA_DEVICE void sync_warp() {
  collective([](WarpState&) {});
}
DPA_DEVICE float as_float(uint32_t x) {
  float f;
  std::memcpy(&f, &x, 4);
  return f;
}
DPA_DEVICE uint32_t bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
DPA_DEVICE float shuffle_xor(float x, int mask) {
  const int lane = thread() & 31;
  WarpState& w = here().warps[thread() >> 5];
  w.in[lane][0] = bits(x);
  collective([&](WarpState& s) {
    for (int l = 0; l < 32; l++) s.out[l][0] = s.in[l ^ mask][0];
  });
  const float r = as_float(w.out[lane][0]);
  collective([](WarpState&) {});
  return r;
}
DPA_DEVICE float shuffle_from(float x, int from) {
  const int lane = thread() & 31;
  WarpState& w = here().warps[thread() >> 5];
  w.in[lane][0] = bits(x);
  collective([&](WarpState& s) {
    for (int l = 0; l < 32; l++) s.out[l][0] = s.in[from][0];
  });
  const float r = as_float(w.out[lane][0]);
  collective([](WarpState&) {});
  return r;
}
template <class T>
DPA_DEVICE T held(T x) {
  return x;
}
DPA_DEVICE float shuffle_first(float x) {
  WarpState& w = here().warps[thread() >> 5];
  w.in[thread() & 31][0] = bits(x);
  collective([&](WarpState& s) { s.out[0][0] = s.in[0][0]; });
  const float r = as_float(w.out[0][0]);
  collective([](WarpState&) {});
  return r;
}
// Clusters of 8. A peer's window begins at its rank times 2^24; the barriers lie behind the block's memory.
constexpr int kCluster = 8;
constexpr uint32_t kBarriers = 0xfff000;
DPA_DEVICE uint32_t peer_window(int rank) { return static_cast<uint32_t>(rank) << 24; }
inline void send_any(uint32_t to, const void* words, int bytes, uint32_t barrier) {
  if (to % bytes) std::printf("misaligned store\n"), std::abort();
  if (to >> 24 != barrier >> 24) std::printf("a barrier of another block\n"), std::abort();
  Store s = {block() / kCluster * kCluster + static_cast<int>(to >> 24), to & 0xffffff, barrier & 0xffffff, bytes, {}};
  std::memcpy(s.words, words, bytes);
  machine.stores.push_back(s);
}
DPA_DEVICE void send_cluster_4(uint32_t to, uint32_t v, uint32_t barrier) { send_any(to, &v, 4, barrier); }
DPA_DEVICE void send_cluster_8(uint32_t to, const uint2& v, uint32_t barrier) { send_any(to, &v, 8, barrier); }
inline void arrive_store(const Store& s) {
  BlockState& b = machine.state[s.block];
  if (s.to + s.bytes > b.memory.size()) std::printf("a store behind the memory\n"), std::abort();
  std::memcpy(b.memory.data() + s.to, s.words, s.bytes);
  Barrier& barrier = b.barriers[(s.barrier - kBarriers) / 8];
  barrier.bytes -= s.bytes;
  barrier.complete();
}
DPA_DEVICE uint32_t block_barriers() { return kBarriers; }
DPA_DEVICE uint32_t shared_address(uint32_t barriers) { return barriers; }
DPA_DEVICE void barrier_init(uint32_t, int) {
  for (Barrier& b : here().barriers) b = {};
}
DPA_DEVICE void barrier_expect(uint32_t at, int bytes) {
  Barrier& b = here().barriers[(at - kBarriers) / 8];
  if (b.pending == 0) std::printf("a barrier is armed twice\n"), std::abort();
  b.pending--, b.bytes += bytes;
  b.complete();
}
DPA_DEVICE void barrier_wait(uint32_t at, uint32_t parity) {
  const Barrier& b = here().barriers[(at - kBarriers) / 8];
  wait_while(b.phase, static_cast<int>(parity));  // which is 0 or 1
}
DPA_DEVICE void cluster_sync() {
  const int cluster = block() / kCluster, mine = machine.cluster_generation[cluster];
  if (++machine.cluster_arrived[cluster] == kCluster * machine.threads)
    machine.cluster_arrived[cluster] = 0, machine.cluster_generation[cluster]++;
  wait_while(machine.cluster_generation[cluster], mine);
}
DPA_DEVICE uint32_t high_product(uint32_t a, uint32_t b) { return static_cast<uint32_t>((uint64_t{a} * b) >> 32); }
template <uint32_t kSelectors>
DPA_DEVICE uint32_t spread_bytes(uint32_t x) {
  uint32_t made = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t from = kSelectors >> 4 * i & 7;
    if (from < 4) made |= (x >> 8 * from & 0xff) << 8 * i;
  }
  return made;
}
constexpr float kWidenedE4m3 = 256.0f;
template <uint32_t kSelectors>
DPA_DEVICE uint32_t widen_e4m3(uint32_t x) {
  const uint32_t w = spread_bytes<kSelectors>(x);
  return (w & 0x80008000u) | ((w & 0x7f007f00u) >> 1);
}
DPA_DEVICE float quotient(float a, float b) { return a / b; }
DPA_DEVICE uint32_t or_xor(uint32_t a, uint32_t b, uint32_t c) { return a | (b ^ c); }
DPA_DEVICE float quotient_exact(float a, float b) { return a / b; }
DPA_DEVICE float exponential_fast(float x) { return std::exp(x); }
DPA_DEVICE float exponential(float x) { return std::exp(x); }
DPA_DEVICE float inverse_root_exact(float x) { return 1.0f / std::sqrt(x); }
DPA_DEVICE float inverse_root(float x) { return 1.0f / std::sqrt(x); }

DPA_DEVICE float load_constant(const float* p) { return *p; }
DPA_DEVICE uint4 load_message_16(const uint32_t* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16) std::printf("misaligned load\n"), std::abort();
  return *reinterpret_cast<const uint4*>(p);
}
DPA_DEVICE uint2 load_message_8(const uint32_t* p) {
  if (reinterpret_cast<uintptr_t>(p) % 8) std::printf("misaligned load\n"), std::abort();
  return *reinterpret_cast<const uint2*>(p);
}
DPA_DEVICE uint32_t load_message_word(const uint32_t* p) { return *p; }
DPA_DEVICE void store_message_word(uint32_t* p, uint32_t v, bool wanted = true) {
  if (wanted) *p = v;
}
DPA_DEVICE void store_message_8(uint32_t* p, const uint2& v) { *reinterpret_cast<uint2*>(p) = v; }
DPA_DEVICE void store_message_16(uint32_t* p, const uint4& v) { *reinterpret_cast<uint4*>(p) = v; }
DPA_DEVICE uint4 load_16(const void* p) { return load_message_16(static_cast<const uint32_t*>(p)); }
DPA_DEVICE void store_16(void* p, const uint4& v) {
  if (reinterpret_cast<uintptr_t>(p) % 16) std::printf("misaligned store\n"), std::abort();
  *static_cast<uint4*>(p) = v;
}
DPA_DEVICE uint32_t add_word(uint32_t* p, uint32_t v) {
  const uint32_t before = *p;
  *p += v;
  return before;
}
DPA_DEVICE uint32_t load_acquire_word(const uint32_t* p) {
  yield();
  return *p;
}
DPA_DEVICE void fence() {}
DPA_DEVICE void dependency_sync() {}
DPA_DEVICE void dependency_trigger() {}
// What a copy is to write is no number, of e4m3 a wrong one, until it has been waited for.
inline void copy_any(uint32_t to, const void* from, int bytes) {
  if (to % bytes || reinterpret_cast<uintptr_t>(from) % bytes) std::printf("misaligned copy\n"), std::abort();
  if (to + bytes > here().memory.size()) std::printf("a copy beyond shared memory\n"), std::abort();
  std::memset(shared() + to, 0xff, bytes);
  machine.now->open.push_back({to, static_cast<const uint8_t*>(from), bytes});
}
DPA_DEVICE void copy_async_line_16(uint32_t to, const void* from) { copy_any(to, from, 16); }
DPA_DEVICE void copy_async_16_or_zeros(uint32_t to, const void* from, bool there) {
  copy_any(to, there ? from : nullptr, 16);
}
DPA_DEVICE void copy_async_16_if(uint32_t to, const void* from, bool there) { copy_async_16_or_zeros(to, from, there); }
DPA_DEVICE void copy_async_8(uint32_t to, const void* from) { copy_any(to, from, 8); }
DPA_DEVICE void copy_async_commit() {
  machine.now->groups.push_back(machine.now->open);
  machine.now->open.clear();
}
template <int kPending>
void copy_async_wait() {
  auto& g = machine.now->groups;
  while (g.size() > kPending) {
    for (const Copy& c : g[0])
      c.from ? std::memcpy(shared() + c.to, c.from, c.bytes) : std::memset(shared() + c.to, 0, c.bytes);
    g.erase(g.begin());
  }
}
DPA_DEVICE uint4 load_shared_16(uint32_t at) {
  uint4 v;
  std::memcpy(&v, shared() + at, 16);
  return v;
}
DPA_DEVICE float4 load_shared(uint32_t at) {
  float4 v;
  std::memcpy(&v, shared() + at, 16);
  return v;
}
DPA_DEVICE uint2 load_shared_8(uint32_t at) {
  uint2 v;
  std::memcpy(&v, shared() + at, 8);
  return v;
}
DPA_DEVICE uint32_t load_shared_word(uint32_t at) {
  if (at % 4 || at + 4 > here().memory.size()) std::printf("bad shared address\n"), std::abort();
  uint32_t v;
  std::memcpy(&v, shared() + at, 4);
  return v;
}
template <bool kTransposed>
inline void load_four_matrices(uint32_t (&b)[4], uint32_t at) {
  const int lane = thread() & 31;
  if (at % 16 || at + 16 > here().memory.size()) std::printf("bad ldmatrix address\n"), std::abort();
  WarpState& w = here().warps[thread() >> 5];
  w.in[lane][0] = at;
  uint8_t* memory = shared();
  collective([&](WarpState& s) {
    for (int l = 0; l < 32; l++)
      for (int m = 0; m < 4; m++)
        for (int half = 0; half < 2; half++) {
          const int row = kTransposed ? l % 4 * 2 + half : l / 4, column = kTransposed ? l / 4 : l % 4 * 2 + half;
          std::memcpy(reinterpret_cast<uint8_t*>(&s.out[l][m]) + half * 2, memory + s.in[m * 8 + row][0] + column * 2,
                      2);
        }
  });
  for (int m = 0; m < 4; m++) b[m] = w.out[lane][m];
  collective([](WarpState&) {});
}
DPA_DEVICE void load_matrix_x4(uint32_t (&b)[4], uint32_t at) { load_four_matrices<false>(b, at); }
DPA_DEVICE void load_matrix_x4_transposed(uint32_t (&b)[4], uint32_t at) { load_four_matrices<true>(b, at); }

struct Half {};
struct BFloat16 {};
inline float half_value(uint32_t x) {
  _Float16 h;
  const uint16_t u = x;
  std::memcpy(&h, &u, 2);
  return h;
}
inline uint32_t half_bits(float x) {
  const _Float16 h = static_cast<_Float16>(x);
  uint16_t u;
  std::memcpy(&u, &h, 2);
  return u;
}
inline uint32_t bfloat_bits(float x) {
  const uint32_t u = bits(x);
  return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
DPA_DEVICE uint32_t pack(BFloat16, float l, float h) { return bfloat_bits(l) | bfloat_bits(h) << 16; }
DPA_DEVICE uint32_t pack(Half, float l, float h) { return half_bits(l) | half_bits(h) << 16; }
DPA_DEVICE float2 unpack(BFloat16, uint32_t v) { return {as_float(v << 16), as_float(v & 0xffff0000u)}; }
DPA_DEVICE float2 unpack(Half, uint32_t v) { return {half_value(v & 0xffff), half_value(v >> 16)}; }
DPA_DEVICE uint32_t to_tf32(float x) { return (bits(x) + 0x1000u) & 0xffffe000u; }
DPA_DEVICE void split_pair(float x, float y, float scale, uint32_t& high, uint32_t& low) {
  x *= scale, y *= scale;
  high = pack(Half{}, x, y);
  const float2 h = unpack(Half{}, high);
  low = pack(Half{}, (x - h.x) * math::kLowScale, (y - h.y) * math::kLowScale);
}

// k = 16 (two numbers a register) or 8 (one).
template <class Type>
void mma_any(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  const int lane = thread() & 31;
  WarpState& w = here().warps[thread() >> 5];
  uint32_t* in = w.in[lane];
  in[0] = a.x, in[1] = a.y, in[2] = a.z, in[3] = a.w, in[4] = b0, in[5] = b1;
  for (int i = 0; i < 4; i++) in[6 + i] = bits(c[i]);
  collective([](WarpState& s) {
    auto value = [](uint32_t x, int i) {
      if constexpr (std::is_same_v<Type, float>)
        return as_float(x & 0xffffe000u);  // the last 13 bits do not count
      else {
        const float2 v = unpack(Type{}, x);
        return i ? v.y : v.x;
      }
    };
    constexpr int per = std::is_same_v<Type, float> ? 1 : 2;
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++) {
        const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
        float sum = as_float(s.in[l][6 + i]);
        for (int k = 0; k < 8 * per; k++) {
          const int q = k / per % 4, half = k / per / 4;
          sum += value(s.in[row % 8 * 4 + q][row / 8 + half * 2], k % per) *
                 value(s.in[column * 4 + q][4 + half], k % per);
        }
        s.out[l][i] = bits(sum);
      }
  });
  for (int i = 0; i < 4; i++) c[i] = as_float(w.out[lane][i]);
  collective([](WarpState&) {});
}
DPA_DEVICE void mma(BFloat16, float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  mma_any<BFloat16>(c, a, b0, b1);
}
DPA_DEVICE void mma(Half, float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) { mma_any<Half>(c, a, b0, b1); }
DPA_DEVICE void mma(float, float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) { mma_any<float>(c, a, b0, b1); }

inline void fiber_entry() {
  machine.body(machine.argument);
  machine.now->done = true;
  yield();
}
// Runs body(argument) in every thread of the grid, blocks at random turns, until all are done.
inline void launch(int blocks, int shared_bytes, void (*body)(void*), void* argument, unsigned seed,
                   int threads = 256) {
  machine.blocks = blocks, machine.threads = threads, machine.body = body, machine.argument = argument;
  machine.state.assign(blocks, {});
  for (auto& b : machine.state) b.memory.assign(shared_bytes, 0xff);
  machine.fibers.clear();
  machine.fibers.resize(blocks * threads);
  for (int i = 0; i < blocks * threads; i++) {
    Fiber& f = machine.fibers[i];
    f.block = i / threads, f.thread = i % threads;
    f.stack.resize(48 << 10);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = nullptr;
    makecontext(&f.context, fiber_entry, 0);
  }
  machine.stores.clear();
  machine.cluster_arrived.assign(blocks / kCluster + 1, 0);
  machine.cluster_generation.assign(blocks / kCluster + 1, 0);
  std::mt19937 random(seed);
  int left = blocks * threads;
  while (left > 0) {
    for (size_t n = random() % (machine.stores.size() + 1); n > 0; n--) {  // stores arrive in any order
      const size_t i = random() % machine.stores.size();
      arrive_store(machine.stores[i]);
      machine.stores[i] = machine.stores.back();
      machine.stores.pop_back();
    }
    const int block = random() % blocks, turns = 1 + random() % 64;
    for (int turn = 0; turn < turns; turn++) {
      const int warp = random() % (threads / 32);
      for (int i = 0; i < 32; i++) {
        Fiber& f = machine.fibers[block * threads + warp * 32 + i];
        if (f.done || (f.watched && *f.watched == f.seen)) continue;
        go_on(f);
        if (f.done) left--;
      }
    }
  }
}

}  // namespace dpa::kernels::unet1d::device
