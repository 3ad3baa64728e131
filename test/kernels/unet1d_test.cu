// The packed U-Net against the float64 reference, and its speed (unet1d_bench.cu).
//   unet1d_test test     every configuration, every path and weight type: one forward pass, and a loop with noise and
//                        inpainting
//   unet1d_test quick    the small configurations alone (for compute-sanitizer)
//   unet1d_test step     a step at batch 1 inside a captured loop, sizes in real use
//   unet1d_test bench    other batches too
//   unet1d_test profile  where the one-sample kernel's last step goes
// A second word, `clustered`, keeps to the clustered path. A further word keeps to the cases and benchmarks whose names
// contain it.
#include "test/kernels/unet1d_case.cuh"

namespace dpa::test {
namespace {

struct Case {
  const char* name;
  Config config;
  int batch, horizon;
  bool large;
};

const Case kCases[] = {
    {"64/128/256 T16", {2, 3, {64, 128, 256}, 5, 8, 64, 20, true}, 1, 16, false},
    {"64/128/256 T8 k3 bias only, da 7, batch 3", {7, 3, {64, 128, 256}, 3, 8, 32, 5, false}, 3, 8, false},
    {"64/128 T20 da 22", {22, 2, {64, 128}, 5, 8, 32, 0, true}, 1, 20, false},
    {"128/256 T48 batch 2", {2, 2, {128, 256}, 5, 8, 32, 11, true}, 2, 48, false},
    {"256/512 T16 batch 5", {2, 2, {256, 512}, 5, 8, 32, 3, true}, 5, 16, false},
    {"512 T16 (two channel pairs a thread)", {2, 1, {512}, 5, 8, 32, 3, true}, 1, 16, false},
    {"128 T16", {3, 1, {128}, 5, 8, 16, 3, true}, 1, 16, false},
    {"128/128/256/256 T16 (equal widths)", {2, 4, {128, 128, 256, 256}, 3, 8, 32, 3, true}, 1, 16, false},
    {"256/128 T8 (joined width equals output)", {2, 2, {256, 128}, 3, 8, 32, 3, true}, 1, 8, false},
    {"48/80 groups 4 T12", {2, 2, {48, 80}, 5, 4, 16, 3, true}, 2, 12, false},
    {"32/64/96 groups 16 k7", {5, 3, {32, 64, 96}, 7, 16, 16, 3, true}, 2, 16, false},
    {"64/128/256 T16 batch 16", {2, 3, {64, 128, 256}, 5, 8, 64, 20, true}, 16, 16, false},
    {"128/256/512/1024 T16", {2, 4, {128, 256, 512, 1024}, 5, 8, 64, 4, true}, 1, 16, false},
    {"128 actions on 128", {128, 2, {128, 256}, 3, 8, 16, 0, true}, 1, 8, false},
    {"256 T16 batch 4", {2, 1, {256}, 5, 8, 32, 3, true}, 4, 16, false},
    {"256/512 T8 k3 bias only, da 7, batch 16", {7, 2, {256, 512}, 3, 8, 32, 3, false}, 16, 8, false},
    {"256/512 T16 batch 40", {2, 2, {256, 512}, 5, 8, 32, 0, true}, 40, 16, false},
    {"256/512/1024 T8 batch 12", {3, 3, {256, 512, 1024}, 3, 8, 32, 3, true}, 12, 8, true},
    {"256/512/1024 T16 (67 M)", {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 1, 16, true},
    {"256/512/1024 T48 da 16", {16, 3, {256, 512, 1024}, 5, 8, 256, 206, true}, 1, 48, true},
    {"256/512/1024 T16 batch 16", {2, 3, {256, 512, 1024}, 5, 8, 128, 40, true}, 16, 16, true},
    {"256/512/1024 T16 batch 2", {2, 3, {256, 512, 1024}, 5, 8, 128, 40, true}, 2, 16, true},
    {"256/512/1024 T16 batch 5 da 22", {22, 3, {256, 512, 1024}, 5, 8, 128, 40, true}, 5, 16, true},
    {"512/1024/2048 T16 (252 M)", {2, 3, {512, 1024, 2048}, 5, 8, 128, 132, true}, 1, 16, true},
    {"512/1024/2048 T64 da 6", {6, 3, {512, 1024, 2048}, 5, 8, 128, 268, true}, 1, 64, true},
    {"512/1024/2048 T36 k3 bias only, da 7", {7, 3, {512, 1024, 2048}, 3, 8, 32, 5, false}, 1, 36, true},
    {"512/1024 T62", {3, 2, {512, 1024}, 5, 8, 64, 0, true}, 1, 62, true},
    {"512/1024/2048 T16 batch 16 da 24", {24, 3, {512, 1024, 2048}, 5, 8, 64, 9, true}, 16, 16, true},
    {"256/512 T48 batch 3", {3, 2, {256, 512}, 5, 8, 32, 5, true}, 3, 48, true},
    {"512/1024 T16 batch 6 k7", {3, 2, {512, 1024}, 7, 8, 32, 5, true}, 6, 16, true},
    {"512/1024/2048 T64 batch 8", {6, 3, {512, 1024, 2048}, 5, 8, 64, 9, true}, 8, 64, true},
    {"256/512/1024 T48 batch 16", {16, 3, {256, 512, 1024}, 5, 8, 64, 9, true}, 16, 48, true},
    {"512/1024/2048 T52 da 22", {22, 3, {512, 1024, 2048}, 5, 8, 64, 9, true}, 1, 52, true},
};

int failures = 0;
bool only_clustered = false;
const char* only = "";  // of the tests and benchmarks: those whose names contain it

void test_case(const Case& c, DType dtype, bool loop) {
  const int steps = loop ? 3 : 1, actions = c.config.action_dim, per_sample = c.horizon * actions,
            count = c.batch * per_sample;
  Network net(c.config, dtype);
  const Reference reference(net.plan.config, net.weights);
  const bool each = !loop && c.batch > 1;  // a timestep of its own for every sample
  std::vector<float> timesteps(each ? c.batch : steps);
  for (size_t i = 0; i < timesteps.size(); i++) timesteps[i] = static_cast<float>(90 - 7 * static_cast<int>(i));
  const auto initial = uniform_values(count, 1.5f),
             cond = uniform_values(static_cast<size_t>(c.batch) * c.config.cond_dim),
             noise = uniform_values(static_cast<size_t>(steps) * count);
  const auto condition_data = uniform_values(count);
  std::vector<uint8_t> condition_mask(count);
  for (auto& v : condition_mask) v = uniform() > 0.5f;
  const std::vector<float> table = {1.2f, -0.5f, 0.6f, 0.3f,  0.1f,  0.2f, 1.1f, -0.4f, 0.5f,
                                    0.4f, 0.05f, 0.1f, 1.05f, -0.3f, 0.8f, 0.1f, 0.02f, 0.0f};
  const float clip = 0.9f;

  std::vector<double> expected(count);
  const int samples = c.large && c.batch > 2 ? 2 : c.batch;
  for (int b = 0; b < samples; b++) {
    std::vector<float> x(initial.begin() + b * per_sample, initial.begin() + (b + 1) * per_sample);
    const dpa::test::Vector g(cond.begin() + b * c.config.cond_dim, cond.begin() + (b + 1) * c.config.cond_dim);
    std::vector<double> xd(x.begin(), x.end());
    for (int s = 0; s < steps; s++) {
      Signal in = dpa::test::zeros(actions, c.horizon);
      for (int i = 0; i < per_sample; i++) {
        if (loop && condition_mask[b * per_sample + i]) xd[i] = condition_data[b * per_sample + i];
        in.at(i % actions, i / actions) = xd[i];
      }
      const Signal out = reference.forward(in, timesteps[each ? b : s], g);
      for (int i = 0; i < per_sample; i++) {
        const double eps = out.at(i % actions, i / actions);
        const float* r = table.data() + s * 6;
        if (loop) {
          const double x0 = std::min<double>(std::max<double>(r[0] * xd[i] + r[1] * eps, -clip), clip);
          xd[i] =
              r[2] * x0 + r[3] * xd[i] + r[4] * eps + r[5] * noise[static_cast<size_t>(s) * count + b * per_sample + i];
        } else {
          xd[i] = eps;
        }
      }
    }
    for (int i = 0; i < per_sample; i++)
      expected[b * per_sample + i] =
          loop && condition_mask[b * per_sample + i] ? condition_data[b * per_sample + i] : xd[i];
  }

  Buffer<float> d_timesteps(timesteps), d_cond(cond), d_initial(initial), d_table(table), d_noise(noise),
      d_condition_data(condition_data);
  Buffer<uint8_t> d_condition_mask(condition_mask);
  for (Path path : {Path::kLayered, Path::kPhases, Path::kTeams, Path::kResident, Path::kClustered}) {
    if (!fits(net.plan, c.batch, c.horizon, path)) continue;
    if (only_clustered && path != Path::kClustered) continue;
    double worst = 0;
    bool intact = true, repeats = true;
    std::vector<float> before;
    for (int poison : {0xff, 0x00, 0x7f}) {
      Buffer<uint8_t> work(workspace_bytes(net.plan, c.batch, c.horizon, steps, path, this_device()), poison);
      Buffer<float> out(count);
      Call call = {c.batch,
                   c.horizon,
                   steps,
                   net.packed.data,
                   work.data,
                   d_timesteps.data,
                   each,
                   d_cond.data,
                   d_initial.data,
                   loop ? d_table.data : nullptr,
                   clip,
                   loop ? d_noise.data : nullptr,
                   loop ? d_condition_data.data : nullptr,
                   loop ? d_condition_mask.data : nullptr,
                   out.data,
                   path};
      CHECK(sample(net.plan, call, this_device(), nullptr));
      CHECK(cudaDeviceSynchronize());
      const auto got = out.host();
      double difference = 0, norm = 0;
      for (int i = 0; i < samples * per_sample; i++)
        difference += (got[i] - expected[i]) * (got[i] - expected[i]), norm += expected[i] * expected[i];
      const double error = std::sqrt(difference / norm);
      worst = error > worst || !(error == error) ? error : worst;
      for (int i = 0; i < count; i++) intact = intact && got[i] == got[i];
      intact = intact && work.guard_intact() && out.guard_intact() && net.packed.guard_intact();
      repeats = repeats && (before.empty() || before == got);
      before = got;
    }
    const double limit = dtype == DType::kFloat32 ? 1e-5 : dtype == DType::kBFloat16 ? 3e-2 : 4e-3;
    const bool ok = worst < limit && intact && repeats;
    failures += !ok;
    std::printf("%s %s %-8s %-45s relative error %.2e%s%s\n", ok ? "ok  " : "FAIL", name_of(dtype), name_of(path),
                (std::string(c.name) + (loop ? ", loop" : "")).c_str(), worst,
                intact ? "" : ", unwritten or guard broken", repeats ? "" : ", runs differ");
  }
}

}  // namespace
}  // namespace dpa::test

int main(int argc, char** argv) {
  using namespace dpa::test;
  setvbuf(stdout, nullptr, _IONBF, 0);
  const std::string what = argc > 1 ? argv[1] : "test";
  only_clustered = argc > 2 && std::string(argv[2]) == "clustered";
  if (argc > 2 + only_clustered) only = argv[2 + only_clustered];
  if (what == "profile") {
    for (DType dtype : {DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat32})
      profile_case("67 M", {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, dtype);
    return 0;
  }
  if (what == "bench" || what == "step") {
    bench(what == "bench", only);
    return 0;
  }
  for (const Case& c : kCases) {
    if ((what == "quick" && c.large) || !std::strstr(c.name, only)) continue;
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}) {
      if (dtype == DType::kFloat16 && !fits(make_plan(c.config, dtype), c.batch, c.horizon, Path::kClustered)) continue;
      if (only_clustered && dtype == DType::kFloat32) continue;
      test_case(c, dtype, false);
      if (!c.large || std::strstr(c.name, "67 M") || std::strstr(c.name, "T62")) test_case(c, dtype, true);
    }
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
