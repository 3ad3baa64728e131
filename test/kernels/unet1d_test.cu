// The packed U-Net against the float64 reference, and its speed against the time to read its weights once.
//   unet1d_test test     every configuration, every path and weight type: one forward pass, and a loop with noise and
//                        inpainting
//   unet1d_test quick    the small configurations alone (for compute-sanitizer)
//   unet1d_test step     a step at batch 1 inside a captured loop, sizes in real use
//   unet1d_test bench    other batches too
//   unet1d_test profile  where the one-sample kernel's last step goes
// A second word, `clustered`, keeps to the clustered path. A further word keeps to the cases and benchmarks whose names
// contain it.
// Workspaces and outputs are poisoned, and followed by guard words that must survive.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "kernels/plans/unet1d/cluster_layout.h"
#include "kernels/plans/unet1d/resident_layout.h"
#include "test/kernels/unet1d_reference.h"

using namespace dpa::kernels;
using namespace dpa::kernels::unet1d;
using dpa::test::Reference;
using dpa::test::Signal;
using dpa::test::Weights;

#define CHECK(call)                                                                          \
  do {                                                                                       \
    cudaError_t error_ = (call);                                                             \
    if (error_ != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                                          \
    }                                                                                        \
  } while (0)

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
};

std::mt19937 generator(1);
float uniform() { return std::uniform_real_distribution<float>(-1.0f, 1.0f)(generator); }
std::vector<float> uniform_values(size_t n, float scale = 1.0f) {
  std::vector<float> v(n);
  uint32_t state = generator();
  for (float& x : v) {
    state = state * 1664525u + 1013904223u;
    x = (static_cast<float>(state >> 8) / 8388608.0f - 1.0f) * scale;
  }
  return v;
}

template <class T>
struct Buffer {
  static constexpr size_t kGuard = 4096;
  T* data = nullptr;
  size_t bytes = 0;
  explicit Buffer(size_t n, int poison = 0xff) : bytes(n * sizeof(T)) {
    CHECK(cudaMalloc(&data, bytes + kGuard));
    CHECK(cudaMemset(data, poison, bytes));
    CHECK(cudaMemset(reinterpret_cast<uint8_t*>(data) + bytes, 0xa5, kGuard));
  }
  explicit Buffer(const std::vector<T>& v) : Buffer(v.size()) {
    CHECK(cudaMemcpy(data, v.data(), bytes, cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  std::vector<T> host() const {
    std::vector<T> v(bytes / sizeof(T));
    CHECK(cudaMemcpy(v.data(), data, bytes, cudaMemcpyDeviceToHost));
    return v;
  }
  bool guard_intact() const {
    std::vector<uint8_t> g(kGuard);
    CHECK(cudaMemcpy(g.data(), reinterpret_cast<uint8_t*>(data) + bytes, kGuard, cudaMemcpyDeviceToHost));
    return std::all_of(g.begin(), g.end(), [](uint8_t x) { return x == 0xa5; });
  }
};

// The weights of a convolution as e4m3 holds them: a scale an output channel, its largest magnitude over 448.
void round_to_e4m3(std::vector<float>& w, const std::vector<int>& shape, bool transposed) {
  const size_t taps = shape[2], ins = transposed ? shape[0] : shape[1], outs = transposed ? shape[1] : shape[0];
  auto at = [&](size_t o, size_t i, size_t tap) -> float& {
    return w[(transposed ? i * outs + o : o * ins + i) * taps + tap];
  };
  for (size_t o = 0; o < outs; o++) {
    float most = 0.0f;
    for (size_t i = 0; i < ins * taps; i++) most = std::max(most, std::fabs(at(o, i / taps, i % taps)));
    const float scale = most / 448.0f;
    for (size_t i = 0; i < ins * taps; i++) {
      float& x = at(o, i / taps, i % taps);
      x = scale * static_cast<float>(__nv_fp8_e4m3(x / scale));
    }
  }
}

const char* name_of(DType dtype) {
  return dtype == DType::kFloat32    ? "fp32"
         : dtype == DType::kFloat16  ? "fp16"
         : dtype == DType::kBFloat16 ? "bf16"
                                     : "fp8 ";
}

// A packed network on the device, and its weights on the host as the arithmetic sees them.
struct Network {
  Plan plan;
  Weights weights;
  Buffer<uint8_t> packed;
  explicit Network(const Config& config, DType dtype) : plan(checked(config, dtype)), packed(plan.packed_bytes) {
    std::vector<Buffer<float>*> device;
    std::vector<const void*> pointers;
    for (const WeightInfo& info : plan.weights) {
      size_t n = 1, fan_in = 1;
      for (size_t i = 0; i < info.shape.size(); i++) n *= info.shape[i], fan_in *= i ? info.shape[i] : 1;
      std::vector<float> v =
          uniform_values(n, info.shape.size() > 1 ? 1.7f / std::sqrt(static_cast<float>(fan_in)) : 0.3f);
      if (info.shape.size() == 1 && info.name.find("block.1.weight") != std::string::npos)
        for (float& x : v) x += 1.0f;
      device.push_back(new Buffer<float>(v));
      pointers.push_back(device.back()->data);
      const bool kept = info.name == "down_modules.0.0.blocks.0.block.0.weight" ||
                        info.name == "down_modules.0.0.residual_conv.weight" || info.name == "final_conv.1.weight";
      if (dtype == DType::kBFloat16 && info.shape.size() > 1 && !kept)
        for (float& x : v) x = __bfloat162float(__float2bfloat16(x));
      if (dtype == DType::kFloat8E4M3 && info.shape.size() == 3 && !kept)
        round_to_e4m3(v, info.shape, info.name.find(".2.conv.") != std::string::npos && info.name[0] == 'u');
      else if (dense_dtype(dtype) == DType::kFloat16 && info.shape.size() > 1 && !kept)
        for (float& x : v) x = __half2float(__float2half(x));
      weights[info.name] = std::move(v);
    }
    CHECK(pack(plan, pointers.data(), DType::kFloat32, packed.data, nullptr));
    CHECK(cudaDeviceSynchronize());
    for (auto* b : device) delete b;
  }
  static Plan checked(const Config& config, DType dtype) {
    Plan plan = make_plan(config, dtype);
    if (!plan.error.empty()) std::printf("refused: %s\n", plan.error.c_str()), std::exit(1);
    return plan;
  }
};

Device this_device() {
  Device device;
  CHECK(current_device(device));
  return device;
}
bool fits(const Plan& plan, int batch, int horizon, Path path) {
  const Device device = this_device();
  switch (path) {
    case Path::kClustered: return device.clusters && cluster_layout(plan, batch, horizon).fits;
    case Path::kResident: return device.hopper && resident_fits(plan, batch, horizon, device);
    case Path::kTeams: return team_samples(plan, batch, horizon, device) > 0;
    case Path::kPhases: return phase_samples(plan, batch, horizon, device) > 0;
    default: return true;
  }
}

const char* name_of(Path path) {
  return path == Path::kResident    ? "resident"
         : path == Path::kClustered ? "cluster "
         : path == Path::kTeams     ? "teams   "
         : path == Path::kPhases    ? "phases  "
                                    : "layered ";
}

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

__global__ void read_kernel(const uint4* p, size_t n, uint32_t* out) {
  uint32_t a = 0;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    const uint4 v = __ldcs(p + i);
    a += v.x ^ v.y ^ v.z ^ v.w;
  }
  if (a == 12345) *out = a;
}

template <class F>
float median_us(cudaStream_t stream, int repeats, F f) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> t;
  for (int i = 0; i < repeats; i++) {
    CHECK(cudaEventRecord(begin, stream));
    f();
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    t.push_back(ms * 1e3f);
  }
  std::sort(t.begin(), t.end());
  return t[t.size() / 2];
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
  float us[3];
  int i = 0;
  for (int steps : {10, 20, 40}) {
    Call call = {
        batch,          horizon,      steps, net.packed.data, work.data, d_timesteps.data, false,    d_cond.data,
        d_initial.data, d_table.data, 1.0f,  d_noise.data,    nullptr,   nullptr,          out.data, path};
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(sample(net.plan, call, this_device(), stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int w = 0; w < 3; w++) CHECK(cudaGraphLaunch(exec, stream));
    us[i++] = median_us(stream, 11, [&] { CHECK(cudaGraphLaunch(exec, stream)); });
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
  }
  const double step = (us[2] - us[1]) / 20;
  std::printf(
      "%-22s %s batch %2d T %2d %s: step %.1f us = %.2f x floor %.1f us (%.1f MB); 10 steps %.0f us = %.1f steps' "
      "time\n",
      name, name_of(dtype), batch, horizon, name_of(path), step, step / floor_us, floor_us, net.plan.tile_bytes / 1e6,
      us[0], us[0] / step);
  CHECK(cudaStreamDestroy(stream));
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
    {"DP3 252 M", {24, 3, {512, 1024, 2048}, 5, 8, 128, 256, true}, 16, {1, 16}},
    {"ALOHA 80 M", {16, 3, {256, 512, 1024}, 5, 8, 256, 206, true}, 48, {1, 16}},
    {"Simple DP3", {4, 3, {128, 256, 384}, 5, 8, 128, 64, true}, 16, {1, 16, 64}},
    {"ManiSkill", {8, 3, {64, 128, 256}, 5, 8, 64, 84, true}, 16, {1, 16, 64}},
    {"NoMaD", {2, 3, {64, 128, 256}, 3, 8, 256, 256, true}, 8, {1, 16}},
    {"80 M", {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 32, {1, 16}},
    {"80 M da 14", {14, 3, {256, 512, 1024}, 5, 8, 256, 206, true}, 64, {1, 16}},
    {"96/192/320 k7", {2, 3, {96, 192, 320}, 7, 8, 64, 20, true}, 16, {1}},
    {"64/128/256", {2, 3, {64, 128, 256}, 5, 8, 64, 20, true}, 256, {1}},
};

// Every row, on the path that is chosen and on the loop in phases.
void bench(bool all) {
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

}  // namespace

int main(int argc, char** argv) {
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
    bench(what == "bench");
    return 0;
  }
  for (const Case& c : kCases) {
    if ((what == "quick" && c.large) || !std::strstr(c.name, only)) continue;
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}) {
      if (dtype == DType::kFloat16 && !fits(make_plan(c.config, dtype), c.batch, c.horizon, Path::kClustered)) continue;
      if (only_clustered && (dtype == DType::kFloat32 || dtype == DType::kFloat8E4M3)) continue;
      test_case(c, dtype, false);
      if (!c.large || std::strstr(c.name, "67 M")) test_case(c, dtype, true);
    }
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
