// The loop in phases against the float64 reference, and its time.
//   phases_test small          small networks, every type: one evaluation, a loop of 4 steps, repeated bits
//   phases_test bench [type]   the published rows: one evaluation compared, repeated bits, us a step
//   phases_test time [type]    the same without the comparison
//   phases_test blocks         the 80 M network with fewer blocks
//   phases_test plan           what the plan chose for the rows (no GPU)
//   phases_test profile [type] clocks by phase
// small-finished and the like: every input has a phase of its own; small-direct: none has.
// Behind it: a part of the rows' names, bytes of shared memory a block, multiprocessors.
// Compiled for the host with DPA_EMULATE, `small` runs the kernel in an emulator (phases_emulator.h): behind it a part of
// the names, multiprocessors, steps, bytes of shared memory.
#ifdef DPA_EMULATE
#include "kernels/cuda/unet1d/phases_kernel.cuh"
#else
#include "kernels/cuda/unet1d/phases.cu"
#endif
#include "test/kernels/unet1d_loop.h"

using namespace dpa::test;

namespace {
Finish finish = Finish::kByTime;

// One loop on the device.
struct Run : dpa::test::LoopBuffers {
  PhasePlan plan;
  PhaseLoop loop = {};
  int blocks;

  Run(const Case& k, const Network& n, int steps, const Device& device)
      : LoopBuffers(k, n, steps),
        plan(make_phases(n.plan, k.batch, k.horizon, device, finish)),
        blocks(device.multiprocessors) {
    if (!plan.error.empty()) {
      std::printf("%s: %s\n", c.name, plan.error.c_str());
      return;
    }
    static_cast<LoopArguments&>(loop) = LoopBuffers::loop;
    buffers.push_back(allocate(phase_workspace_bytes(plan, device)));
    set_phases(loop, n.plan, plan, buffers.back());
    loop.noise_stride = static_cast<int64_t>(initial.size());
  }

  void launch(int steps, bool network_alone, unsigned seed = 1) {
    PhaseLoop l = loop;
    l.steps = steps;
    if (network_alone) l.table = nullptr, l.condition_mask = nullptr;
    clear(l.workspace, plan.workspace_words * size_t{4});
#ifdef DPA_EMULATE
    struct Job {
      PhaseLoop l;
      DType d;
    } job = {l, net.plan.dtype};
    device::launch(
        blocks, plan.shared.bytes,
        [](void* p) {
          const Job& j = *static_cast<Job*>(p);
          switch (j.d) {
            case DType::kBFloat16: return device::run_phases<device::TileBf16>(j.l);
            case DType::kFloat16: return device::run_phases<device::TileFp16>(j.l);
            case DType::kFloat8E4M3: return device::run_phases<device::TileE4m3>(j.l);
            default: return device::run_phases<device::TileFp32>(j.l);
          }
        },
        &job, seed);
#else
    (void)seed;
    CHECK(launch_phases(net.plan.dtype, l, blocks, nullptr));
#endif
  }
  bool stuck() const {
    uint32_t word;
    download(&word, loop.workspace, 4);
    return word != 0;
  }
};

bool check(const Case& c, DType dtype, const Device& device, int loop_steps) {
  const auto begin = std::chrono::steady_clock::now();
  const Network net(c.config, dtype);
  Run run(c, net, std::max(loop_steps, 1), device);
  if (!run.plan.error.empty()) return false;
  run.launch(1, true);
  const std::vector<float> one = run.result();
  const double e1 = run.error(1, true, one);
  bool same = true, stuck = run.stuck();
  double e2 = 0;
  run.launch(1, true, 2);
  same = same && run.result() == one;
  if (loop_steps > 0) {
    run.launch(loop_steps, false, 3);
    const auto first = run.result();
    e2 = run.error(loop_steps, false, first);
    run.launch(loop_steps, false, 4);
    same = same && run.result() == first;
  }
  stuck = stuck || run.stuck();
  const bool good = e1 < limit_of(dtype) && e2 < limit_of(dtype) && same && !stuck;
  std::printf("%-40s %s, %d blocks: error %.2e, loop %.2e, bits %s%s  %s (%.1f s, %.1f KB shared, %d slots)\n", c.name,
              name_of(dtype), device.multiprocessors, e1, e2, same ? "repeat" : "DIFFER", stuck ? ", STUCK" : "",
              good ? "good" : "WRONG", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
              run.plan.shared.bytes / 1024.0, run.plan.ring_slots);
  std::fflush(stdout);
  return good;
}

void print_plan(const Case& c, DType dtype, const Device& device) {
  const Plan plan = make_plan(c.config, dtype);
  const PhasePlan p = make_phases(plan, c.batch, c.horizon, device, finish);
  std::printf("%s %s, %d blocks: %s %zu phases, %.1f KB shared, workspace %.2f MB, weights %.1f MB\n", c.name,
              name_of(dtype), device.multiprocessors, p.error.c_str(), p.phases.size(), p.shared.bytes / 1024.0,
              phase_workspace_bytes(p, device) * 1e-6, plan.tile_bytes * 1e-6);
  for (size_t i = 0; i < p.phases.size(); i++) {
    const Phase& f = p.phases[i];
    std::printf(
        "  %2zu: %s%4d%s -> %4d, T %3d -> %3d  out %2d in %d batch %2d = %3d tiles; warps %d rows %d columns %d k, %d "
        "column tiles\n",
        i, f.kind == PhaseKind::kFinish ? "finish " : "", f.channels_in, f.joined ? "*2" : "  ", f.channels_out,
        f.times_in, f.times_out, f.slices_out, f.slices_in, f.slices_batch, f.tiles, f.warps_rows, f.warps_columns,
        f.warps_k, f.column_tiles);
  }
}

#ifndef DPA_EMULATE
void bench(const Case& c, DType dtype, const Device& device, bool compare) {
  const auto begin = std::chrono::steady_clock::now();
  const Network net(c.config, dtype);
  Run run(c, net, 30, device);
  if (!run.plan.error.empty()) return;
  run.launch(1, true);
  const std::vector<float> one = run.result();
  bool stuck = run.stuck();
  const double e = stuck || !compare ? 0 : run.error(1, true, one);
  bool same = true;
  float us = 0;
  if (!stuck) {
    for (int i = 0; i < 20; i++) {
      run.launch(1, true);
      same = same && run.result() == one;
    }
    us = step_time([&](int n) { run.launch(n, false); }, run.max_steps);
    stuck = run.stuck();
  }
  std::printf("%-26s %s %3d blocks | error %.2e %s | bits %s | %8.1f us a step%s | floor %5.1f | %.1f s\n", c.name,
              name_of(dtype), device.multiprocessors, e, e < limit_of(dtype) ? "good " : "WRONG",
              same ? "repeat" : "DIFFER", us, stuck ? " STUCK" : "", net.plan.tile_bytes / 4.35e6,
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  std::fflush(stdout);
}

// Mean clocks of the blocks that work, by phase, in the last step of a loop.
void profile(const Case& c, DType dtype, const Device& device) {
  const Network net(c.config, dtype);
  Run run(c, net, 20, device);
  if (!run.plan.error.empty()) return;
  const size_t phases = run.plan.phases.size(), count = device.multiprocessors * phases * kPhaseMarks;
  run.loop.marks = static_cast<long long*>(allocate(count * 8));
  run.buffers.push_back(run.loop.marks);
  clear(run.loop.marks, count * 8);
  for (int i = 0; i < 3; i++) run.launch(20, false);
  run.result();
  std::vector<long long> marks(count);
  download(marks.data(), run.loop.marks, count * 8);
  std::printf(
      "profile of %s %s: medians of clocks: setup, receive, receive again (warm; parameters stored), statistics, "
      "apply, apply again (warm), multiply, store, sum, least receive (block 0: begin)\n",
      c.name, name_of(dtype));
  double total[9] = {};
  for (size_t f = 0; f < phases; f++) {
    std::vector<long long> parts[9];
    for (int b = 0; b < device.multiprocessors; b++) {
      const long long* k = marks.data() + (b * phases + f) * kPhaseMarks;
      if (!k[0] || !k[2] || !k[4]) continue;
      const long long m[9] = {k[0], k[1], k[2], k[8], k[3], k[4], k[5], k[6], k[7]};
      for (int i = 0; i < 8; i++) parts[i].push_back(m[i + 1] - m[i]);
      parts[8].push_back(m[8] - m[0]);
    }
    if (parts[0].empty()) continue;
    std::printf("  %2zu:", f);
    for (int i = 0; i < 9; i++) {
      std::sort(parts[i].begin(), parts[i].end());
      const long long v = parts[i][parts[i].size() / 2];
      total[i] += static_cast<double>(v);
      std::printf(" %6lld", v);
    }
    std::printf("  %6lld (%lld)\n", parts[1][0], marks[f * kPhaseMarks] - marks[0]);
  }
  std::printf("  all");
  for (double t : total) std::printf(" %6.0f", t);
  std::printf("\n");
  std::fflush(stdout);
}

#endif

}  // namespace

int main(int argc, char** argv) {
  std::string what = argc > 1 ? argv[1] : "small";
  const std::string filter = argc > 2 ? argv[2] : "";
  const DType types[] = {DType::kBFloat16, DType::kFloat32, DType::kFloat8E4M3, DType::kFloat16};
  for (const auto& [name, way] : {std::pair{"-finished", Finish::kAlways}, {"-direct", Finish::kNever}})
    if (what.ends_with(name)) finish = way, what.resize(what.size() - std::strlen(name));
  Device device = {132, 227 << 10};
  if (what == "plan" && argc > 3) device.shared_bytes = std::atoi(argv[3]);
  auto wanted = [&](const Case& c, DType d) {
    return filter.empty() || (std::string(name_of(d)) + " " + c.name).find(filter) != std::string::npos;
  };
  if (what == "plan") {
    for (const Case& c : kRows)
      for (DType d : types)
        if (wanted(c, d)) print_plan(c, d, device);
    return 0;
  }
#ifdef DPA_EMULATE
  device.multiprocessors = argc > 3 ? std::atoi(argv[3]) : 6;
  if (argc > 5) device.shared_bytes = std::atoi(argv[5]);
  int bad = 0;
  for (const Case& c : kSmall)
    for (DType d : types)
      if (wanted(c, d)) bad += !check(c, d, device, argc > 4 ? std::atoi(argv[4]) : 0);
  return bad != 0;
#else
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  device.multiprocessors = properties.multiProcessorCount;
  device.shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
  if (argc > 3) device.shared_bytes = std::atoi(argv[3]);
  if (argc > 4) device.multiprocessors = std::min(device.multiprocessors, std::atoi(argv[4]));
  if (what == "small")
    for (const Case& c : kSmall)
      for (DType d : types)
        if (wanted(c, d)) check(c, d, device, 4);
  if (what == "bench" || what == "time")
    for (const Case& c : kRows)
      for (DType d : types)
        if (d != DType::kFloat16 && wanted(c, d)) bench(c, d, device, what == "bench");
  if (what == "profile")
    for (const Case& c : kRows)
      for (DType d : types)
        if (d != DType::kFloat16 && wanted(c, d)) profile(c, d, device);
  if (what == "blocks")
    for (int n : {108, 82, 46, 16}) {
      device.multiprocessors = n;
      bench(kRows[0], DType::kBFloat16, device, true);
    }
  return 0;
#endif
}
