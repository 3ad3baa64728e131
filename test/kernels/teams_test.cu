// The loop in teams against the float64 reference, and its time.
//   teams_test small            small networks, every type, both hand-overs: one evaluation, a loop of 4 steps, bits
//   teams_test bench [filter]   the narrow rows: one evaluation compared, repeated bits, us a step
//   teams_test plan             what the plan chose (no GPU)
//   TEAMS=n                     at most so many teams at once, for larger samples a team
//   teams_test profile [filter] clocks by part of a phase (a build with DPA_TEST_MARKS)
// Compiled for the host with DPA_EMULATE, `small` runs the kernel in an emulator (phases_emulator.h).
#ifdef DPA_EMULATE
#include "kernels/cuda/unet1d/teams_kernel.cuh"
#else
#include "kernels/cuda/unet1d/teams.cu"
#endif
#include "test/kernels/unet1d_loop.h"

using namespace dpa::test;

namespace {

const Case kNarrow[] = {
    {"64/128 T8 batch 11", {3, 2, {64, 128}, 3, 8, 32, 5, true}, 11, 8},
    {"96/192 T8 k3 bias only batch 2", {2, 2, {96, 192}, 3, 8, 16, 5, false}, 2, 8},
    {"32/64/96 groups 8 k7 T16", {5, 3, {32, 64, 96}, 7, 8, 16, 3, true}, 1, 16},
    {"128/64 T32", {2, 2, {128, 64}, 3, 8, 16, 3, true}, 1, 32},
    {"128/64 groups 16 T16 batch 3", {2, 2, {128, 64}, 5, 16, 16, 3, true}, 3, 16},
    {"64 T64 one level k9", {2, 1, {64}, 9, 8, 16, 3, true}, 1, 64},
    {"160 T16 one level k1", {2, 1, {160}, 1, 8, 16, 3, true}, 1, 16},
    {"32/64 k1 T8 (warps without steps)", {2, 2, {32, 64}, 1, 8, 16, 3, true}, 1, 8},
    {"relu 32/64 T8 batch 2", {2, 2, {32, 64}, 3, 8, 16, 3, true, true}, 2, 8},
    {"32/32/64/64 T16 (equal widths)", {2, 4, {32, 32, 64, 64}, 3, 8, 16, 3, true}, 2, 16},
    // In some quads one channel is counted; a group has one warp, or several.
    {"40/72 among 64/96 T8", {2, 2, {64, 96}, 3, 8, 16, 3, true, false, {40, 72}}, 1, 8},
    {"40 among 64 T48", {2, 1, {64}, 3, 8, 16, 3, true, false, {40}}, 1, 48},
};
const Case kNarrowRows[] = {
    {"ManiSkill T16", {8, 3, {64, 128, 256}, 5, 8, 64, 84, true}, 1, 16},
    {"Simple DP3 T16", {4, 3, {128, 256, 384}, 5, 8, 128, 64, true}, 1, 16},
    {"NoMaD T8 k3", {2, 3, {64, 128, 256}, 3, 8, 256, 256, false}, 1, 8},
    {"ManiSkill T16 batch 16", {8, 3, {64, 128, 256}, 5, 8, 64, 84, true}, 16, 16},
    {"Simple DP3 T16 batch 16", {4, 3, {128, 256, 384}, 5, 8, 128, 64, true}, 16, 16},
    {"NoMaD T8 k3 batch 16", {2, 3, {64, 128, 256}, 3, 8, 256, 256, false}, 16, 8},
    {"ManiSkill T16 batch 2", {8, 3, {64, 128, 256}, 5, 8, 64, 84, true}, 2, 16},
    {"ManiSkill T16 batch 64", {8, 3, {64, 128, 256}, 5, 8, 64, 84, true}, 64, 16},
    {"NoMaD T8 k3 batch 64", {2, 3, {64, 128, 256}, 3, 8, 256, 256, false}, 64, 8},
    {"96/192/320 k7 T16", {2, 3, {96, 192, 320}, 7, 8, 64, 20, true}, 1, 16},
    {"192/384/640 T16", {2, 3, {192, 384, 640}, 5, 8, 64, 20, true}, 1, 16},
    {"256/512 T16", {2, 2, {256, 512}, 5, 8, 128, 40, true}, 1, 16},
    {"ManiSkill T64", {8, 3, {64, 128, 256}, 5, 8, 64, 84, true}, 1, 64},
    {"Simple DP3 T64", {4, 3, {128, 256, 384}, 5, 8, 128, 64, true}, 1, 64},
    {"80 M T16", {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 1, 16},
};

struct Run : LoopBuffers {
  TeamPlan plan;
  TeamArguments loop = {};
  bool cluster;

  Run(const Case& k, const Network& n, int steps, int teams, int shared, bool in_cluster)
      : LoopBuffers(k, n, steps), plan(make_teams(n.plan, k.batch, k.horizon, teams, shared)), cluster(in_cluster) {
    if (!plan.error.empty()) {
      std::printf("%s %s: %s\n", c.name, name_of(n.plan.dtype), plan.error.c_str());
      return;
    }
    static_cast<LoopArguments&>(loop) = LoopBuffers::loop;
    buffers.push_back(allocate(team_workspace_bytes(plan)));
    set_teams(loop, n.plan, plan, buffers.back());
    loop.noise_stride = static_cast<int64_t>(initial.size());
  }
  void launch(int steps, bool network_alone, unsigned seed = 1) {
    TeamArguments l = loop;
    l.steps = steps;
    if (network_alone) l.table = nullptr, l.condition_mask = nullptr;
    clear(l.workspace, (kTeamFirstWord + static_cast<size_t>(plan.teams) * plan.words) * 4);
#ifdef DPA_EMULATE
    struct Job {
      TeamArguments l;
      DType d;
      bool cluster;
    } job = {l, net.plan.dtype, cluster};
    device::launch(
        plan.teams * kTeamBlocks, plan.shared.bytes,
        [](void* p) {
          const Job& j = *static_cast<Job*>(p);
          auto run = [&]<class Tile>(Tile) {
            if (j.cluster)
              device::run_team<Tile, device::ClusterHandover>(j.l);
            else
              device::run_team<Tile, device::WordHandover>(j.l);
          };
          switch (j.d) {
            case DType::kBFloat16: return run(device::TileBf16{});
            case DType::kFloat16: return run(device::TileFp16{});
            default: return run(device::TileFp32{});
          }
        },
        &job, seed, kTeamThreads);
#else
    (void)seed;
    CHECK(launch_teams(net.plan.dtype, l, plan, cluster, nullptr));
#endif
  }
  bool stuck() const {
    uint32_t word;
    download(&word, loop.workspace, 4);
    return word != 0;
  }
};

bool check(const Case& c, DType dtype, int teams, int shared, bool cluster, int loop_steps) {
  const auto begin = std::chrono::steady_clock::now();
  const Network net(c.config, dtype);
  Run run(c, net, std::max(loop_steps, 1), teams, shared, cluster);
  if (!run.plan.error.empty()) return false;
  run.launch(1, true);
  const std::vector<float> one = run.result();
  const double e1 = run.error(1, true, one);
  run.launch(1, true, 2);
  bool same = run.result() == one;
  double e2 = 0;
  if (loop_steps > 0) {
    run.launch(loop_steps, false, 3);
    const auto first = run.result();
    e2 = run.error(loop_steps, false, first);
    run.launch(loop_steps, false, 4);
    same = same && run.result() == first;
  }
  const bool good = e1 < limit_of(dtype) && e2 < limit_of(dtype) && same && !run.stuck();
  std::printf("%-34s %s %s %d teams: error %.2e, loop %.2e, bits %s%s  %s (%.1f s, %.1f KB)\n", c.name, name_of(dtype),
              cluster ? "cluster" : "words", run.plan.teams, e1, e2, same ? "repeat" : "DIFFER",
              run.stuck() ? ", STUCK" : "", good ? "good" : "WRONG",
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
              run.plan.shared.bytes / 1024.0);
  std::fflush(stdout);
  return good;
}

void print_plan(const Case& c, DType dtype, int teams, int shared) {
  const Plan plan = make_plan(c.config, dtype);
  const TeamPlan p = make_teams(plan, c.batch, c.horizon, teams, shared);
  std::printf(
      "%s %s: %s %d teams of %d samples, %zu phases, %.1f KB shared (slabs %.1f, sums %.1f, loads %.1f), %d slots, "
      "weights %.1f MB\n",
      c.name, name_of(dtype), p.error.c_str(), p.teams, p.samples, p.phases.size(), p.shared.bytes / 1024.0,
      p.slab_bytes / 1024.0, p.sum_segment * 8 / 1024.0, p.warp_loads * kPhaseWarps * 4 / 1024.0, p.buffer_slots,
      plan.tile_bytes * 1e-6);
  int tiles = 0;
  for (const TeamPhase& f : p.phases) {
    int steps = 0;
    for (int s = 0; s < f.num_segments; s++) steps += f.segments[s].steps;
    tiles += steps * f.row_tiles;
    std::printf(
        "  %3d channels a block, T %3d, %3d steps x %d row tiles; warps %d rows %d k, %d rounds; %d column tiles; "
        "epilogue %d quads, %d warps a pair, %d passes\n",
        f.channels, f.times, steps, f.row_tiles, f.warps_rows, 1 << f.log_warps_k, f.rounds, f.column_tiles, f.quads,
        1 << f.log_pair_warps, f.passes);
  }
  std::printf("  a block's weights of a step: %.2f MB\n", tiles * 256e-6 * element_bytes(dtype));
}

#ifndef DPA_EMULATE
int clusters_at_once(int bytes) {
  LaunchConfig one(kTeamBlocks, kTeamThreads, nullptr, bytes);
  return one.clusters(kTeamBlocks).active_clusters(team_kernel<device::TileBf16, true>);
}

void bench(const Case& c, DType dtype, int teams, int shared, bool cluster) {
  const Network net(c.config, dtype);
  Run run(c, net, 30, teams, shared, cluster);
  if (!run.plan.error.empty()) return;
  run.launch(1, true);
  const std::vector<float> one = run.result();
  bool stuck = run.stuck();
  const double e = stuck ? 0 : run.error(1, true, one);
  bool same = true;
  float us = 0;
  if (!stuck) {
    for (int i = 0; i < 20; i++) {
      run.launch(1, true);
      same = same && run.result() == one;
    }
    us = step_time([&](int steps) { run.launch(steps, false); }, run.max_steps);
    stuck = run.stuck();
  }
  std::printf("%-26s %s %-7s %2d teams of %d | error %.2e %s | bits %s | %8.1f us a step%s\n", c.name, name_of(dtype),
              cluster ? "cluster" : "words", run.plan.teams, run.plan.samples, e,
              e < limit_of(dtype) ? "good " : "WRONG", same ? "repeat" : "DIFFER", us, stuck ? " STUCK" : "");
  std::fflush(stdout);
}

void profile(const Case& c, DType dtype, int teams, int shared, bool cluster) {
  const Network net(c.config, dtype);
  Run run(c, net, 20, teams, shared, cluster);
  if (!run.plan.error.empty()) return;
  const size_t phases = run.plan.phases.size(), blocks = run.plan.teams * kTeamBlocks,
               count = blocks * phases * kTeamMarks;
  run.loop.marks = static_cast<long long*>(allocate(count * 8));
  run.buffers.push_back(run.loop.marks);
  clear(run.loop.marks, count * 8);
  for (int i = 0; i < 3; i++) run.launch(20, false);
  run.result();
  std::vector<long long> marks(count);
  download(marks.data(), run.loop.marks, count * 8);
  std::printf(
      "profile of %s %s %s: medians of clocks of thread 0: fetch, receive, multiply, meet, sum, moments, send; sum\n",
      c.name, name_of(dtype), cluster ? "cluster" : "words");
  double total[8] = {};
  for (size_t f = 0; f < phases; f++) {
    std::vector<long long> parts[8];
    for (size_t b = 0; b < blocks; b++) {
      const long long* k = marks.data() + (b * phases + f) * kTeamMarks;
      long long at[8];
      for (int i = 0; i < 8; i++) at[i] = k[i] ? k[i] : at[i - 1];
      for (int i = 0; i < 7; i++) parts[i].push_back(at[i + 1] - at[i]);
      parts[7].push_back(at[7] - at[0]);
    }
    std::printf("  %2zu:", f);
    for (int i = 0; i < 8; i++) {
      std::sort(parts[i].begin(), parts[i].end());
      total[i] += static_cast<double>(parts[i][parts[i].size() / 2]);
      std::printf(" %6lld", parts[i][parts[i].size() / 2]);
    }
    std::printf("\n");
  }
  std::printf("  all");
  for (double t : total) std::printf(" %6.0f", t);
  std::printf("\n");
  std::fflush(stdout);
}
#endif

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "small", filter = argc > 2 ? argv[2] : "";
  const DType types[] = {DType::kBFloat16, DType::kFloat32, DType::kFloat16};
  auto wanted = [&](const Case& c, DType d, bool cluster) {
    const std::string name = std::string(name_of(d)) + (cluster ? " cluster " : " words ") + c.name;
    return filter.empty() || name.find(filter) != std::string::npos;
  };
  int teams = 16, shared = 227 << 10, bad = 0;
  if (what == "plan") {
    for (const Case& c : kNarrowRows)
      for (DType d : types)
        if (wanted(c, d, true)) print_plan(c, d, teams, shared);
    return 0;
  }
#ifdef DPA_EMULATE
  teams = argc > 3 ? std::atoi(argv[3]) : 2;
  for (const Case& c : kNarrow)
    for (DType d : types)
      for (bool cluster : {false, true})
        if (wanted(c, d, cluster)) bad += !check(c, d, teams, shared, cluster, argc > 4 ? std::atoi(argv[4]) : 0);
#else
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  shared = static_cast<int>(properties.sharedMemPerBlockOptin);
  const int by_words = properties.multiProcessorCount / kTeamBlocks;
#ifdef DPA_WORDS_ALONE  // code for 8.0 has no clusters
  const int clusters = 0;
#else
  const int clusters = properties.major >= 9 ? clusters_at_once(shared - kTeamStatic) : 0;
#endif
  std::printf("%s: %d teams by words, %d clusters\n", properties.name, by_words, clusters);
  for (bool cluster : {true, false}) {
    if (cluster && clusters == 0) continue;
    teams = cluster ? clusters : by_words;
    if (const char* most = std::getenv("TEAMS")) teams = std::min(teams, std::atoi(most));
    if (what == "small")
      for (const Case& c : kNarrow)
        for (DType d : types)
          if (wanted(c, d, cluster)) bad += !check(c, d, teams, shared, cluster, 4);
    for (const Case& c : kNarrowRows)
      for (DType d : types) {
        if (d == DType::kFloat16 || !wanted(c, d, cluster)) continue;
        if (what == "bench") bench(c, d, teams, shared, cluster);
        if (what == "profile") profile(c, d, teams, shared, cluster);
      }
  }
#endif
  return bad != 0;
}
