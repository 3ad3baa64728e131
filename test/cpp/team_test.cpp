// The team of threads of ops/common/team.h: what is thrown while the work is made reaches the caller, and no thread
// keeps waiting for work that never comes.
#include "ops/common/team.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <new>

namespace {

constexpr unsigned kPatience = 60;  // seconds, after which a hang ends the process

class Team : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(4);
    alarm(kPatience);
  }
  void TearDown() override { alarm(0); }
};

TEST_F(Team, RunsOnEveryThreadOnce) {
  std::atomic<int> runs{0};
  int size = 0;
  dpa::run_as_team(
      4, [&](int members) { size = members; },
      [&](auto& team, int) {
        team.barrier();
        runs.fetch_add(1);
      });
  EXPECT_GE(size, 1);
  EXPECT_EQ(runs.load(), size);
}

TEST_F(Team, MemoryThatRunsOutReachesTheCaller) {
  std::atomic<int> runs{0};
  const auto run = [&](auto&, int) { runs.fetch_add(1); };
  EXPECT_THROW(dpa::run_as_team(4, [](int) { throw std::bad_alloc(); }, run), std::bad_alloc);
  EXPECT_EQ(runs.load(), 0);
  dpa::run_as_team(4, [](int) {}, run);
  EXPECT_GE(runs.load(), 1);
}

}  // namespace
