// A fixed-rate control loop on an exported policy, without Python: observations in, actions out.
//
//   robot POLICY.pt|POLICY.pt2 [HZ=10] [CYCLES=50]
//
// Shapes, device and checksum are those of the policy's manifest, POLICY.pt.json. `read_observation` and `send_actions`
// stand for the robot. A policy from images (dpa export --images) takes the newest frames of each camera and of the
// state, which the program keeps. A cycle misses its deadline where the actions are not there when the next cycle is
// due. With the variable DPA_CHECK set to the file of a scripted module that has the tensors observation (or
// observation_0, observation_1, ...), noise and actions, the program first compares and fails on a difference.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <functional>
#include <memory>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;
using Policy = std::function<at::Tensor(const Tensors& inputs)>;  // observations, then noise

Policy open_policy(const std::string& path) {
  if (path.ends_with(".pt2")) {
    auto package = std::make_shared<torch::inductor::AOTIModelPackageLoader>(path);
    return [package](const Tensors& inputs) { return package->run(inputs)[0]; };
  }
  auto module = std::make_shared<torch::jit::Module>(torch::jit::load(path));
  return [module](const Tensors& inputs) { return module->forward({inputs.begin(), inputs.end()}).toTensor(); };
}

struct Input {
  std::vector<int64_t> shape;
  at::ScalarType type;
};

struct Manifest {
  std::vector<Input> observations;
  std::vector<int64_t> noise;
  int64_t frames;  // that observations stack in their second dimension; 0 where they are vectors
  at::Device device;
  uint32_t crc32;
};

// PyTorch opens a file whose weights are damaged, and computes with them.
void check_file(const std::string& path, uint32_t expected) {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < table.size(); ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit) table[i] = (table[i] >> 1) ^ (table[i] & 1 ? 0xEDB88320u : 0);
  }
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read the policy ", path);
  uint32_t crc = ~0u;
  for (std::vector<char> piece(1 << 20); file;) {
    file.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    for (std::streamsize i = 0; i < file.gcount(); ++i)
      crc = (crc >> 8) ^ table[(crc ^ static_cast<unsigned char>(piece[i])) & 0xFF];
  }
  TORCH_CHECK(~crc == expected, "the policy must be the file of its manifest, and whole, got ", path);
}

std::string found_in(const std::string& text, const char* pattern, const char* otherwise = "") {
  std::smatch match;
  return std::regex_search(text, match, std::regex(pattern)) ? std::string(match[1]) : otherwise;
}

// The little that the loop needs of the JSON: the inputs' shapes and types stand before the outputs'.
Manifest read_manifest(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK(file, "cannot read the manifest ", path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::string given = text.substr(0, text.find("\"outputs\""));
  std::vector<Input> inputs;
  const std::regex entry(R"re("shape":\s*\[([^\]]*)\],\s*"dtype":\s*"(\w+)")re");
  for (std::sregex_iterator it(given.begin(), given.end(), entry), end; it != end; ++it) {
    std::istringstream sizes((*it)[1]);
    auto& into = inputs.emplace_back(Input{{}, (*it)[2] == "uint8" ? at::kByte : at::kFloat});
    for (std::string size; std::getline(sizes, size, ',');) into.shape.push_back(std::stoll(size));
  }
  const auto device = found_in(text, R"re("device":\s*"(\w+)")re");
  const auto crc32 = found_in(text, R"re("crc32":\s*(\d+))re");
  TORCH_CHECK(
      inputs.size() >= 2 && !device.empty() && !crc32.empty() && found_in(text, R"re("part":\s*"(\w+)")re") == "loop",
      "the manifest must be of a whole loop (dpa export --part loop), got ", path);
  const auto noise = inputs.back().shape;
  inputs.pop_back();
  const auto frames = std::stoll(found_in(text, R"re("frames":\s*(\d+))re", "0"));
  return {std::move(inputs), noise, frames, at::Device(device), static_cast<uint32_t>(std::stoul(crc32))};
}

// What a sensor shows now: an image as height, width and colour, a state as numbers.
at::Tensor read_observation(at::IntArrayRef shape, at::ScalarType type, int cycle) {
  return type == at::kByte ? at::full(shape, cycle % 256, type) : at::full(shape, 0.01 * cycle, type);
}

// The newest frames of each observation, the oldest first. The first one stands for those before it.
class Frames {
 public:
  explicit Frames(const Manifest& manifest) : manifest_(manifest), kept_(manifest.observations.size()) {}

  Tensors read(int cycle) {
    Tensors stacked;
    for (size_t i = 0; i < kept_.size(); ++i) {
      auto [shape, type] = manifest_.observations[i];
      if (manifest_.frames > 0) shape.erase(shape.begin() + 1);
      auto& kept = kept_[i];
      kept.push_back(read_observation(shape, type, cycle).to(manifest_.device));
      const auto count = static_cast<size_t>(std::max<int64_t>(manifest_.frames, 1));
      while (kept.size() < count) kept.push_front(kept.front());
      if (kept.size() > count) kept.pop_front();
      stacked.push_back(manifest_.frames > 0 ? at::stack(Tensors(kept.begin(), kept.end()), 1) : kept.back());
    }
    return stacked;
  }

 private:
  const Manifest& manifest_;
  std::vector<std::deque<at::Tensor>> kept_;
};

// Bringing them to the CPU waits for the device.
void send_actions(const at::Tensor& computed) {
  const auto actions = computed.cpu();
  TORCH_CHECK(at::isfinite(actions).all().item<bool>(), "actions must be finite");
}

// The largest difference from the actions that Python computed.
double check(const Policy& policy, const std::string& path, const Manifest& manifest) {
  const auto data = torch::jit::load(path);
  const auto tensor = [&](const std::string& name) { return data.attr(name).toTensor().to(manifest.device); };
  Tensors inputs;
  if (manifest.frames == 0) inputs.push_back(tensor("observation"));
  for (size_t i = 0; manifest.frames > 0 && i < manifest.observations.size(); ++i)
    inputs.push_back(tensor("observation_" + std::to_string(i)));
  inputs.push_back(tensor("noise"));
  return (policy(inputs) - tensor("actions")).abs().max().item<double>();
}

void print_histogram(std::vector<double> ms) {
  std::sort(ms.begin(), ms.end());
  const auto at = [&](double share) { return ms[static_cast<size_t>(share * static_cast<double>(ms.size() - 1))]; };
  std::printf("latency ms: median %.2f, p90 %.2f, p99 %.2f, worst %.2f\n", at(0.5), at(0.9), at(0.99), ms.back());
  constexpr int kBins = 8;
  const double low = ms.front(), width = std::max((ms.back() - low) / kBins, 1e-6);
  std::vector<int> counts(kBins);
  for (const double value : ms) ++counts[std::min(kBins - 1, static_cast<int>((value - low) / width))];
  for (int bin = 0; bin < kBins; ++bin)
    std::printf("%9.2f ms %5d %s\n", low + bin * width, counts[bin],
                std::string(60 * counts[bin] / ms.size(), '#').c_str());
}

int run(int argc, char** argv) {
  const auto number = [&](int index, int64_t otherwise) { return index < argc ? std::atoll(argv[index]) : otherwise; };
  const int64_t hz = number(2, 10), cycles = number(3, 50);
  if (argc < 2 || hz < 1 || cycles < 1) {
    std::fprintf(stderr, "usage: robot POLICY [HZ] [CYCLES]\n");
    return 2;
  }
  const std::string path = argv[1];
  const Manifest manifest = read_manifest(path + ".json");
  check_file(path, manifest.crc32);
  const c10::InferenceMode inference;
  const Policy policy = open_policy(path);
  if (const char* data = std::getenv("DPA_CHECK")) {
    const double difference = check(policy, data, manifest);
    std::printf("largest difference from Python: %.1e\n", difference);
    if (!(difference < 1e-4)) return 1;
  }
  Frames frames(manifest);
  const auto plan = [&](int cycle) {
    auto inputs = frames.read(cycle);
    inputs.push_back(at::randn(manifest.noise, at::device(manifest.device)));
    return policy(inputs);
  };
  for (int i = 0; i < 5; ++i) send_actions(plan(0));  // the first calls are slow

  const auto period = std::chrono::nanoseconds(1'000'000'000 / hz);
  std::vector<double> latency;
  int64_t missed = 0;
  auto due = Clock::now();
  for (int cycle = 0; cycle < cycles; ++cycle) {
    const auto start = Clock::now();
    send_actions(plan(cycle));
    const auto done = Clock::now();
    latency.push_back(std::chrono::duration<double, std::milli>(done - start).count());
    due += period;
    if (done > due) ++missed, due = done;  // a late cycle does not make the next ones late
    std::this_thread::sleep_until(due);
  }
  print_histogram(latency);
  std::printf("%lld cycles at %lld Hz, %lld deadlines missed\n", static_cast<long long>(cycles),
              static_cast<long long>(hz), static_cast<long long>(missed));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "robot: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "robot: %s\n", error.what());
    return 1;
  }
}
