// Threads that work on one call together, and wait for one another.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace dpa::kernels::cpu {

/// A barrier for `size` threads that are all running. Waiting threads spin, since a layer takes 0.1 ms, and give way to
/// others after some 10 us, in case there are more threads than cores.
class Team {
 public:
  explicit Team(int size) : size_(size), queues_(new Queue[size]) {}
  int size() const { return size_; }

  void barrier() {
    if (size_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      for (int i = 0; i < size_; i++)
        for (auto& next : queues_[i].next) next.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
      if (spins < kSpins)
        pause();
      else
        std::this_thread::yield();
    }
  }

  /// The part of `count` tasks that a thread does; and runs them.
  template <class F>
  void share(int thread, int64_t count, const F& run) const {
    const int64_t begin = first(thread, count), end = first(thread + 1, count);
    if (begin < end) run(begin, end);
  }

  /// The same with work stealing, for long tasks: a thread that is done with its part takes from the others', since a
  /// core may be busy elsewhere or slower. Between two barriers `list` 0 and 1 can be used, once each, and by a team of
  /// one too.
  template <class F>
  void share_stealing(int thread, int list, int64_t count, const F& run) {
    if (size_ == 1) return share(thread, count, run);
    for (int i = 0; i < size_; i++) {
      const int owner = (thread + i) % size_;
      const int64_t end = first(owner + 1, count);
      for (;;) {
        const int64_t task = first(owner, count) + queues_[owner].next[list].fetch_add(1, std::memory_order_relaxed);
        if (task >= end) break;
        run(task, task + 1);
      }
    }
  }

 private:
  struct alignas(64) Queue {
    std::atomic<int64_t> next[2] = {0, 0};
  };
  int64_t first(int thread, int64_t count) const { return count * thread / size_; }
  static constexpr int kSpins = 2000;
  static void pause() {
#ifdef __x86_64__
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  const int size_;
  const std::unique_ptr<Queue[]> queues_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

}  // namespace dpa::kernels::cpu
