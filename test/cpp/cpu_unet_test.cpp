// The CPU's packed U-Net against PyTorch's float64, at every level of instructions that the machine has, with one
// thread and with three: cpu_unet_test FILE, written by make_models.py. It needs neither Torch nor GoogleTest, so that
// it can be built for another processor.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu/unet1d.h"

namespace {

using namespace dpa::kernels;

class File {
 public:
  explicit File(const char* path) : file_(std::fopen(path, "rb")) {}
  ~File() {
    if (file_) std::fclose(file_);
  }
  bool more() {
    if (!file_) return false;
    const int c = std::fgetc(file_);
    return c != EOF && std::ungetc(c, file_) != EOF;
  }
  template <class T>
  std::vector<T> read(size_t count) {
    std::vector<T> values(count);
    if (count && std::fread(values.data(), sizeof(T), count, file_) != count) {
      std::printf("the file is too short\n");
      std::exit(1);
    }
    return values;
  }

 private:
  std::FILE* file_;
};

/// A network, its inputs and the output that is expected of it.
struct Case {
  cpu::Plan plan;
  int batch, horizon;
  float tolerance;
  std::vector<std::vector<float>> floats;
  std::vector<std::vector<char>> typed;
  std::vector<float> sample, timesteps, cond;
  std::vector<double> expected;

  explicit Case(File& file) {
    constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
    const auto head = file.read<int32_t>(4);
    const auto given = file.read<int32_t>(head[3]);
    unet1d::Config config;
    config.action_dim = given[0], config.kernel_size = given[1], config.num_groups = given[2];
    config.step_dim = given[3], config.cond_dim = given[4], config.film_scale = given[5] & 1;
    config.relu = given[5] & 2;
    config.levels = head[3] - 6;
    for (int i = 0; i < config.levels; i++) config.down_dims[i] = given[6 + i];
    plan = unet1d::make_plan(config, kTypes[head[0]]);
    batch = head[1], horizon = head[2], tolerance = file.read<float>(1)[0];
    for (const auto& weight : plan.weights) {
      size_t count = 1;
      for (const int size : weight.shape) count *= size;
      floats.push_back(file.read<float>(count));
      typed.push_back(file.read<char>(count * unet1d::element_bytes(plan.dtype)));
    }
    const size_t elements = static_cast<size_t>(batch) * horizon * config.action_dim;
    sample = file.read<float>(elements), timesteps = file.read<float>(batch);
    cond = file.read<float>(static_cast<size_t>(batch) * config.cond_dim);
    expected = file.read<double>(elements);
  }
};

/// Memory aligned as the kernels want it, filled with NaN.
std::vector<float> poisoned(size_t bytes, char*& aligned) {
  std::vector<float> memory(bytes / 4 + 32, std::nanf(""));
  aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  return memory;
}

std::vector<float> forward(const Case& c, const cpu::Kernels& kernels, const void* packed, int threads) {
  std::vector<float> output(c.sample.size(), std::nanf(""));
  cpu::Call call = {};
  call.batch = c.batch, call.horizon = c.horizon, call.steps = 1, call.packed = packed;
  call.timesteps = c.timesteps.data(), call.per_sample_timesteps = true;
  call.global_cond = c.cond.data(), call.initial = c.sample.data(), call.output = output.data();
  std::atomic<bool> overflow{false};
  call.overflow = &overflow;
  cpu::Program program;
  char* workspace = nullptr;
  const auto memory = poisoned(cpu::make_program(c.plan, kernels, call, threads, nullptr, program), workspace);
  cpu::make_program(c.plan, kernels, call, threads, workspace, program);
  cpu::Team team(threads);
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back([&, i] { cpu::run(program, team, i); });
  cpu::run(program, team, 0);
  for (auto& other : others) other.join();
  return output;
}

double relative_error(const std::vector<float>& got, const std::vector<double>& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); i++) {
    error += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / norm);
}

/// Whether every level gets the case right.
bool check(const Case& c, int number) {
  auto sources = cpu::pack_sources(c.plan);
  for (size_t i = 0; i < c.plan.weights.size(); i++)
    sources.floats[i] = c.floats[i].data(), sources.typed[i] = c.typed[i].data();
  char* packed = nullptr;
  const auto memory = poisoned(c.plan.packed_bytes, packed);
  cpu::pack(c.plan, sources, packed, 0, cpu::pack_tasks(c.plan));
  bool good = true;
  for (const auto& level : cpu::levels()) {
    if (!level.supported) continue;
    const auto alone = forward(c, *level.kernels, packed, 1), shared = forward(c, *level.kernels, packed, 3);
    const double error = relative_error(alone, c.expected);
    const bool right = error < c.tolerance, same = std::memcmp(alone.data(), shared.data(), 4 * alone.size()) == 0;
    std::printf("network %d, %s: relative error %.1e%s%s\n", number, level.name, error, right ? "" : ", too large",
                same ? "" : ", and three threads give another result");
    good = good && right && same;
  }
  return good;
}

/// Whether small networks are left to one thread, and large ones and batches are not, nor what waits for weights.
bool check_useful_threads() {
  const auto threads = [](int first, int levels, int batch, int horizon = 16) {
    unet1d::Config config;
    config.levels = levels;
    for (int i = 0; i < levels; i++) config.down_dims[i] = first << i;
    return cpu::useful_threads(unet1d::make_plan(config, DType::kFloat32), batch, horizon);
  };
  const bool good = threads(32, 2, 1) == 1 && threads(64, 3, 1) == 4 && threads(64, 3, 16) == 36 &&
                    threads(128, 3, 1) == 15 && threads(256, 3, 1) == 60 && threads(128, 2, 1, 4) == 3;
  if (!good) std::printf("useful_threads counts otherwise\n");
  return good;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 2;
  File file(arguments[1]);
  int number = 0;
  bool good = check_useful_threads();
  for (; file.more(); number++) good = check(Case(file), number) && good;
  if (number == 0) std::printf("no networks in %s\n", arguments[1]);
  return good && number > 0 ? 0 : 1;
}
