// PyTorch's intra-op threads at once, as a team that can wait for one another.
#pragma once
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <optional>
#include <thread>

#include "kernels/cpu/team.h"

namespace dpa {

/// Runs `run(team, thread)` on up to `most` threads, all in one parallel region. at::parallel_for promises neither that
/// its pieces run at the same time nor how many there are: OpenMP runs them all at once, so there each piece signs in,
/// and those who did are the team. With another thread pool the caller is alone. One thread calls `make(size)` before;
/// what that throws ends the region on all of them. `run` must not throw: the others would wait for its thread.
template <class Make, class Run>
void run_as_team(int64_t most, const Make& make, const Run& run) {
#if AT_PARALLEL_OPENMP
  const int64_t wanted = at::in_parallel_region() ? 1 : std::min<int64_t>(most, at::get_num_threads());
#else
  const int64_t wanted = 1;
#endif
  std::atomic<int> members{0};
  std::atomic<int64_t> covered{0};
  std::atomic<bool> ready{false};
  std::exception_ptr error;
  std::optional<kernels::cpu::Team> team;
  at::parallel_for(0, wanted, 1, [&](int64_t begin, int64_t end) {
    const int thread = members.fetch_add(1);
    covered.fetch_add(end - begin);
    if (thread == 0) {
      while (covered.load() != wanted) std::this_thread::yield();
      try {
        team.emplace(members.load());
        make(team->size());
      } catch (...) {
        error = std::current_exception();
      }
      ready.store(true, std::memory_order_release);
    }
    while (!ready.load(std::memory_order_acquire)) std::this_thread::yield();
    if (error == nullptr) run(*team, thread);
  });
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace dpa
