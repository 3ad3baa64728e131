// Threads that work on one call together, and wait for one another.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace dpa::kernels::cpu {

/// A barrier for `size` threads that are all running. Waiting threads spin, since a layer takes 0.1 ms, and give way to
/// others after some 10 us, in case there are more threads than cores.
class Team {
 public:
  explicit Team(int size) : size_(size) {}
  int size() const { return size_; }

  void barrier() {
    if (size_ == 1) return;
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
      if (spins < kSpins)
        pause();
      else
        std::this_thread::yield();
    }
  }

  /// The part of `count` tasks that a thread does; and runs them.
  template <class F>
  void share(int thread, int64_t count, const F& run) const {
    const int64_t begin = count * thread / size_, end = count * (thread + 1) / size_;
    if (begin < end) run(begin, end);
  }

 private:
  static constexpr int kSpins = 2000;
  static void pause() {
#ifdef __x86_64__
    _mm_pause();
#endif
  }
  const int size_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

}  // namespace dpa::kernels::cpu
