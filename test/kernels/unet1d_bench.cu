// The packed U-Net's speed against the time to read its weights once, and where the one-sample kernel's last step goes.
#include "test/kernels/unet1d_case.cuh"

namespace dpa::test {
namespace {

__global__ void read_kernel(const uint4* p, size_t n, uint32_t* out) {
  uint32_t a = 0;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    const uint4 v = __ldcs(p + i);
    a += v.x ^ v.y ^ v.z ^ v.w;
  }
  if (a == 12345) *out = a;
}

void bench_case(const char* name, const Network& net, int batch, int horizon, double bandwidth, Path path) {
  const Config& config = net.plan.config;
  const DType dtype = net.plan.dtype;
  constexpr int kSteps = 40;
  const int count = batch * horizon * config.action_dim;
  std::vector<float> timesteps(kSteps);
  for (int i = 0; i < kSteps; i++) timesteps[i] = static_cast<float>(99 - 2 * i);
  std::vector<float> table;
  for (int i = 0; i < kSteps; i++)
    for (float r : {1.1f, -0.4f, 0.5f, 0.4f, 0.05f, 0.1f}) table.push_back(r);
  Buffer<float> d_timesteps(timesteps), d_cond(uniform_values(static_cast<size_t>(batch) * config.cond_dim)),
      d_initial(uniform_values(count)), d_table(table), d_noise(uniform_values(static_cast<size_t>(kSteps) * count)),
      out(count);
  Buffer<uint8_t> work(workspace_bytes(net.plan, batch, horizon, kSteps, path, this_device()));
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  const double floor_us = net.plan.tile_bytes / bandwidth * 1e6;
  double us[3];
  int i = 0;
  for (int steps : {10, 20, 40}) {
    Call call = {
        batch,          horizon,      steps, net.packed.data, work.data, d_timesteps.data, false,    d_cond.data,
        d_initial.data, d_table.data, 1.0f,  d_noise.data,    nullptr,   nullptr,          out.data, path};
    const auto exec = captured(stream, [&] { CHECK(sample(net.plan, call, this_device(), stream)); });
    us[i++] = median_us(stream, 11, [&] { CHECK(cudaGraphLaunch(exec, stream)); });
    CHECK(cudaGraphExecDestroy(exec));
  }
  const double step = (us[2] - us[1]) / 20;
  std::printf(
      "%-22s %s batch %2d T %2d %s: step %.1f us = %.2f x floor %.1f us (%.1f MB); 10 steps %.0f us = %.1f steps' "
      "time\n",
      name, name_of(dtype), batch, horizon, name_of(path), step, step / floor_us, floor_us, net.plan.tile_bytes / 1e6,
      us[0], us[0] / step);
  CHECK(cudaStreamDestroy(stream));
}

struct Row {
  const char* name;
  Config config;
  int horizon;
  std::vector<int> batches;
};
const Row kRows[] = {
    {"80 M", {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 16, {1, 2, 4, 8, 16, 28, 64, 256}},
    {"80 M k3", {2, 3, {256, 512, 1024}, 3, 8, 256, 132, true}, 16, {1, 16}},
    {"LeRobot 252 M", {6, 3, {512, 1024, 2048}, 5, 8, 128, 268, true}, 64, {1, 2, 4, 8, 16, 64}},
    {"DP3 252 M", {24, 3, {512, 1024, 2048}, 5, 8, 128, 256, true}, 16, {1, 2, 4, 8, 16}},
    {"ALOHA 80 M", {16, 3, {256, 512, 1024}, 5, 8, 256, 206, true}, 48, {1, 16}},
    {"Simple DP3", {4, 3, {128, 256, 384}, 5, 8, 128, 64, true}, 16, {1, 16, 64}},
    {"ManiSkill", {8, 3, {64, 128, 256}, 5, 8, 64, 84, true}, 16, {1, 16, 64}},
    {"NoMaD", {2, 3, {64, 128, 256}, 3, 8, 256, 256, true}, 8, {1, 16}},
    {"80 M", {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 32, {1, 16}},
    {"80 M da 14", {14, 3, {256, 512, 1024}, 5, 8, 256, 206, true}, 64, {1, 16}},
    {"96/192/320 k7", {2, 3, {96, 192, 320}, 7, 8, 64, 20, true}, 16, {1}},
    {"64/128/256", {2, 3, {64, 128, 256}, 5, 8, 64, 20, true}, 256, {1}},
};

}  // namespace

// Every row, on the path that is chosen and on the loop in phases.
void bench(bool all, const char* only) {
  const size_t bytes = size_t{2} << 30;
  double bandwidth;
  {
    Buffer<uint8_t> big(bytes);
    Buffer<uint32_t> sink(1);
    bandwidth = bytes / (median_us(nullptr, 11,
                                   [&] {
                                     read_kernel<<<132 * 8, 512>>>(reinterpret_cast<const uint4*>(big.data), bytes / 16,
                                                                   sink.data);
                                   }) *
                         1e-6);
  }
  cudaDeviceProp p;
  CHECK(cudaGetDeviceProperties(&p, 0));
  std::printf("%s, read %.2f TB/s\n", p.name, bandwidth * 1e-12);
  for (const Row& row : kRows) {
    for (DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kFloat8E4M3}) {
      const std::string name = std::string(name_of(dtype)) + " " + row.name + " T" + std::to_string(row.horizon);
      if (!std::strstr(name.c_str(), only)) continue;
      const Network net(row.config, dtype);
      for (int batch : row.batches) {
        if (batch > 1 && !all) continue;
        if (batch > 16 && dtype != DType::kBFloat16) continue;
        const Path chosen = choose_path(net.plan, batch, row.horizon, this_device());
        bench_case(row.name, net, batch, row.horizon, bandwidth, chosen);
        if (chosen != Path::kPhases && fits(net.plan, batch, row.horizon, Path::kPhases))
          bench_case(row.name, net, batch, row.horizon, bandwidth, Path::kPhases);
      }
    }
  }
}

// Where the last step's time goes: clocks of every layer, the median, least and most of the blocks.
void profile_case(const char* name, const Config& config, DType dtype) {
  Network net(config, dtype);
  constexpr int kSteps = 8, kRuns = 9;
  const int count = 16 * config.action_dim, layers = static_cast<int>(net.plan.convs.size()) + 1,
            blocks = net.plan.slices_out * net.plan.slices_in;
  std::vector<float> timesteps(kSteps), table;
  for (int i = 0; i < kSteps; i++) timesteps[i] = static_cast<float>(99 - 2 * i);
  for (int i = 0; i < kSteps; i++)
    for (float r : {1.1f, -0.4f, 0.5f, 0.4f, 0.05f, 0.1f}) table.push_back(r);
  Buffer<float> d_timesteps(timesteps), d_cond(uniform_values(config.cond_dim)), d_initial(uniform_values(count)),
      d_table(table), out(count);
  Buffer<uint8_t> work(workspace_bytes(net.plan, 1, 16, kSteps, Path::kResident, this_device()));
  const size_t words = static_cast<size_t>(blocks) * layers * kMarks;
  Buffer<uint32_t> record(words);
  Call call = {1,       16,          kSteps,         net.packed.data, work.data,  d_timesteps.data,
               false,   d_cond.data, d_initial.data, d_table.data,    1.0f,       nullptr,
               nullptr, nullptr,     out.data,       Path::kResident, record.data};
  std::vector<std::vector<uint32_t>> runs;
  for (int i = 0; i < kRuns; i++) {
    CHECK(cudaMemset(record.data, 0, words * 4));
    CHECK(sample(net.plan, call, this_device(), nullptr));
    CHECK(cudaDeviceSynchronize());
    runs.push_back(record.host());
  }
  std::printf("%s %s, clocks (least / median / most of the blocks)\n", name, name_of(dtype));
  auto at = [&](const std::vector<uint32_t>& r, int b, int l, int what) {
    return r[(static_cast<size_t>(b) * layers + l) * kMarks + what];
  };
  long total[kMarks] = {};
  for (int l = 0; l < layers; l++) {
    std::printf("%2d %5d T%-2d ", l, l ? net.plan.convs[l - 1].channels_out : config.down_dims[0],
                16 >> (l ? net.plan.convs[l - 1].level_out : 0));
    for (int what = 1; what < kMarks; what++) {
      std::vector<int> low, middle, high;
      for (const auto& r : runs) {
        std::vector<int> d;
        for (int b = 0; b < blocks; b++) {
          const uint32_t now = at(r, b, l, what);
          uint32_t before = at(r, b, l, what - 1);
          if (before == 0 && what > 1) before = at(r, b, l, what - 2);
          d.push_back(now ? static_cast<int>(now - before) : 0);
        }
        std::sort(d.begin(), d.end());
        low.push_back(d[0]), middle.push_back(d[blocks / 2]), high.push_back(d[blocks - 1]);
      }
      for (auto* v : {&low, &middle, &high}) std::sort(v->begin(), v->end());
      std::printf(" %5d/%5d/%5d", low[kRuns / 2], middle[kRuns / 2], high[kRuns / 2]);
      total[what] += middle[kRuns / 2];
    }
    std::vector<int> spread;
    for (const auto& r : runs) {
      int first = 0, last = 0;
      for (int b = 0; b < blocks; b++) {
        const int d = static_cast<int>(at(r, b, l, kMessagesThere) - at(r, 0, 0, kBegin));
        first = b ? std::min(first, d) : d, last = b ? std::max(last, d) : d;
      }
      spread.push_back(last - first);
    }
    std::sort(spread.begin(), spread.end());
    std::printf(" | spread %d\n", spread[kRuns / 2]);
  }
  std::printf("sum of medians");
  for (int what = 1; what < kMarks; what++) std::printf(" %ld", total[what]);
  std::printf("\n");
}

}  // namespace dpa::test
