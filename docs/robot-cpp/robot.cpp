// A fixed-rate control loop on an exported policy, without Python: observations in, actions out.
//
//   robot POLICY.pt|POLICY.pt2 [HZ=10] [CYCLES=50]
//
// Shapes, device and checksum are those of the policy's manifest, POLICY.pt.json. `read_observation` and `send_actions`
// stand for the robot. A policy from images (dpa export --images) takes the newest frames of each camera and of the
// state, which the program keeps. A cycle is late where its actions are not sent when the next cycle is due. A policy
// of `--part continuing` acts while it samples: a cycle sends one action, or none where no chunk has one. Of every
// cycle that sends, the program notes when it was due, when it sent, and the age of the observation behind its actions;
// the variable DPA_STEPS names a file to write these to. With the variable DPA_CHECK set to the file of a scripted
// module that has the tensors observation (or observation_0, observation_1, ...), noise, actions and, where the policy
// takes them, last_chunk and weights, the program first compares and fails on a difference.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <exception>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;
using Policy = std::function<at::Tensor(const Tensors& inputs)>;  // observations, then noise

Policy open_policy(const std::string& path, bool package) {
  if (package) {
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
  int64_t first;   // of a chunk's actions, the one for the time of the newest observation
  at::Device device;
  uint32_t crc32;
  bool continuing;
  bool package;  // of AOTInductor, or else TorchScript
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

// Digits alone: `std::stoll` would read the 1 of 1.5.
int64_t whole(const std::string& text, const char* name) {
  const bool fits = std::regex_match(text, std::regex(R"re(\d{1,10})re"));
  TORCH_CHECK(fits, "the manifest's ", name, " must be a whole number, got ", text.empty() ? "nothing" : text);
  return std::stoll(text);
}

// The little that the loop needs of the JSON: the inputs' shapes and types stand before the outputs'.
Manifest read_manifest(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK(file, "cannot read the manifest ", path);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  std::erase_if(text, [](unsigned char c) { return std::isspace(c); });
  const auto format = found_in(text, R"re("format":"?([^",}]*))re");
  const bool package = format == "aoti";
  TORCH_CHECK(package || format == "torchscript", path, ": format must be torchscript or aoti, got ", format);
  const std::string given = text.substr(0, text.find("\"outputs\""));
  std::vector<Input> inputs;
  const std::regex entry(R"re("shape":\[([^\]]*)\],"dtype":"(uint8|float32)")re");
  for (std::sregex_iterator it(given.begin(), given.end(), entry), end; it != end; ++it) {
    std::istringstream sizes((*it)[1]);
    auto& into = inputs.emplace_back(Input{{}, (*it)[2] == "uint8" ? at::kByte : at::kFloat});
    for (std::string size; std::getline(sizes, size, ',');) into.shape.push_back(whole(size, "size of an input"));
  }
  const auto device = found_in(text, R"re("device":"(cpu|cuda)")re");
  const auto part = found_in(text, R"re("part":"(\w+)")re");
  const bool continuing = part == "continuing";
  TORCH_CHECK(inputs.size() >= (continuing ? 4 : 2) && !device.empty() && (part == "loop" || continuing),
              "the manifest must be of a whole loop (dpa export --part loop or continuing), got ", path);
  const auto rest = inputs.end() - (continuing ? 3 : 1);  // noise, and perhaps last_chunk and weights
  const auto noise = rest->shape;
  const auto crc32 = static_cast<uint32_t>(whole(found_in(text, R"re("crc32":([^,}]*))re"), "crc32"));
  const auto frames = whole(found_in(text, R"re("frames":([^,}]*))re", "0"), "frames");
  const auto first = whole(found_in(text, R"re("first_action":([^,}]*))re", "0"), "first_action");
  bool fits = noise.size() == 4 && first < noise[2];
  for (auto it = inputs.begin(); it != rest; ++it)
    fits = fits && it->shape.size() > 1 && it->shape[0] == noise[1] && (frames == 0 || it->shape[1] == frames);
  for (auto it = rest + 1; fits && it != inputs.end(); ++it)
    fits = std::equal(it->shape.begin(), it->shape.end(), noise.begin() + 1, noise.end());
  TORCH_CHECK(fits, "the shapes of the manifest must fit one another, frames and first_action, got ", path);
  inputs.erase(rest, inputs.end());
  return {std::move(inputs), noise, frames, first, at::Device(device), crc32, continuing, package};
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
  if (manifest.continuing) inputs.insert(inputs.end(), {tensor("last_chunk"), tensor("weights")});
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

// What happened in the cycles.
class Report {
 public:
  explicit Report(Clock::duration period) : period_(period), start_(Clock::now()) {}

  // A cycle's actions, from an observation of that time, were sent just now. Returns when the next cycle is due.
  Clock::time_point sent(int64_t cycle, Clock::time_point due, Clock::time_point observed) {
    const auto now = Clock::now();
    sent_.push_back({cycle, due - start_, now - start_, now - observed});
    return next(due, now);
  }
  // A cycle had no action: the robot holds its place.
  Clock::time_point without_action(Clock::time_point due) {
    ++without_;
    return next(due, Clock::now());
  }

  void print(int64_t hz) const {
    std::printf("%lld cycles at %lld Hz, %lld without an action, %lld late\n",
                static_cast<long long>(std::ssize(sent_) + without_), static_cast<long long>(hz),
                static_cast<long long>(without_), static_cast<long long>(late_));
    std::vector<double> ages;
    for (const auto& step : sent_) ages.push_back(std::chrono::duration<double, std::milli>(step.age).count());
    if (ages.empty()) return;
    std::sort(ages.begin(), ages.end());
    std::printf("age of the observation ms: median %.2f, worst %.2f\n", ages[(ages.size() - 1) / 2], ages.back());
  }

  // One line a cycle that sent, times in nanoseconds.
  void write(const char* path) const {
    std::ofstream file(path);
    file << "cycle,due,sent,age\n";
    const auto ns = [](Clock::duration time) { return std::chrono::nanoseconds(time).count(); };
    for (const auto& step : sent_)
      file << step.cycle << ',' << ns(step.due) << ',' << ns(step.sent) << ',' << ns(step.age) << '\n';
    TORCH_CHECK(file.flush(), "cannot write ", path);
  }

 private:
  struct Step {
    int64_t cycle;
    Clock::duration due, sent, age;
  };

  Clock::time_point next(Clock::time_point due, Clock::time_point now) {
    due += period_;
    if (now <= due) return due;
    ++late_;
    return now;  // a late cycle does not make the next ones late
  }

  const Clock::duration period_;
  const Clock::time_point start_;
  std::vector<Step> sent_;
  int64_t without_ = 0, late_ = 0;
};

void finish(const Report& report, int64_t hz, const std::vector<double>& latency) {
  if (!latency.empty()) print_histogram(latency);
  report.print(hz);
  if (const char* path = std::getenv("DPA_STEPS")) report.write(path);
}

// A chunk is computed from the newest observation each time, and the actions that come next wait for it.
int act_in_turn(const Policy& policy, const Manifest& manifest, int64_t hz, int64_t cycles) {
  Frames frames(manifest);
  const auto plan = [&](int cycle) {
    auto inputs = frames.read(cycle);
    inputs.push_back(at::randn(manifest.noise, at::device(manifest.device)));
    return policy(inputs).slice(1, manifest.first);
  };
  for (int i = 0; i < 5; ++i) send_actions(plan(0));  // the first calls are slow

  const auto period = std::chrono::nanoseconds(1'000'000'000 / hz);
  std::vector<double> latency;
  Report report(period);
  auto due = Clock::now();
  for (int cycle = 0; cycle < cycles; ++cycle) {
    const auto start = Clock::now();
    send_actions(plan(cycle));
    latency.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    due = report.sent(cycle, due, start);
    std::this_thread::sleep_until(due);
  }
  finish(report, hz, latency);
  return 0;
}

// Actions (T, Da), on the CPU, for the cycles from `first` on, some of them before that of their observation, and the
// time of that.
struct Chunk {
  int64_t first;
  Clock::time_point observed;
  at::Tensor actions;
};

// What is left of a chunk from a cycle on, its last action repeated, and how much of it holds, (1, T, Da) each: from
// place `first` on all of the `delay` actions that are sent before the next chunk is there, then less and less.
std::pair<at::Tensor, at::Tensor> left_over(const Chunk& chunk, int64_t cycle, int64_t first, int64_t delay) {
  const int64_t length = chunk.actions.size(0), used = std::min(cycle - chunk.first, length), left = length - used;
  const auto padding = chunk.actions.slice(0, length - 1).expand({used, -1});
  const auto actions = at::cat({chunk.actions.slice(0, used), padding}).unsqueeze(0);
  const int64_t held = std::min(first + delay, left);
  const auto weights = at::zeros({length});
  weights.slice(0, std::min(first, held), held).fill_(1);
  weights.slice(0, held, left).copy_(at::linspace(1, 0, left - held + 2).slice(0, 1, -1));
  return {actions, weights.view({1, -1, 1}).expand_as(actions).contiguous()};
}

// Samples chunks in a thread of its own, each from the newest observation.
class Sampler {
 public:
  Sampler(Policy policy, const Manifest& manifest, const Tensors& observation)
      : policy_(std::move(policy)),
        manifest_(manifest),
        chunk_{-manifest.first, Clock::now(), first_chunk(observation)},
        thread_([this] { run(); }) {}
  ~Sampler() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  // Hands over the observation of a cycle; returns its action, undefined where there is none, and the time of the
  // observation behind that.
  std::pair<at::Tensor, Clock::time_point> exchange(int64_t cycle, Tensors observation) {
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    cycle_ = cycle, observed_ = Clock::now(), observation_ = std::move(observation);
    changed_.notify_one();
    const int64_t place = cycle - chunk_.first;
    return {place < chunk_.actions.size(0) ? chunk_.actions[place] : at::Tensor(), chunk_.observed};
  }
  std::vector<double> latency() const {
    const std::lock_guard lock(mutex_);
    return latency_;
  }

 private:
  at::Tensor sample(Tensors inputs, const at::Tensor& last, const at::Tensor& weights) {
    inputs.push_back(at::randn(manifest_.noise, at::device(manifest_.device)));
    for (const auto& tensor : {last, weights}) inputs.push_back(tensor.to(manifest_.device));
    return policy_(inputs)[0].cpu();
  }

  // The robot stands still for the first calls, which are slow.
  at::Tensor first_chunk(const Tensors& observation) {
    TORCH_CHECK(manifest_.noise[1] == 1, "the policy must be exported with --batch 1, got ", manifest_.noise[1]);
    const auto none = at::zeros({1, manifest_.noise[2], manifest_.noise[3]});
    for (int i = 0; i < 4; ++i) sample(observation, none, none);
    return sample(observation, none, none);
  }

  void run() try {
    const c10::InferenceMode inference;
    std::deque<int64_t> delays{1};  // cycles from an observation to its chunk
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || cycle_ > chunk_.first + manifest_.first; });
      if (stop_) return;
      const int64_t cycle = cycle_;
      const auto observed = observed_;
      const auto observation = observation_;
      const Chunk last = chunk_;
      lock.unlock();
      const auto start = Clock::now();
      const int64_t begin = cycle - manifest_.first, delay = *std::max_element(delays.begin(), delays.end());
      const auto [rest, weights] = left_over(last, begin, manifest_.first, delay);
      const auto actions = sample(observation, rest, weights);
      lock.lock();
      latency_.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
      chunk_ = {begin, observed, actions};
      delays.push_back(cycle_ + 1 - cycle);  // the next cycle is the first to take of it
      if (delays.size() > 8) delays.pop_front();
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    error_ = std::current_exception();
  }

  const Policy policy_;
  const Manifest manifest_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Chunk chunk_;
  int64_t cycle_ = 0;
  Clock::time_point observed_;
  Tensors observation_;
  std::vector<double> latency_;
  std::exception_ptr error_;
  bool stop_ = false;
  std::thread thread_;  // the last member: it uses the others
};

int act_while_sampling(const Policy& policy, const Manifest& manifest, int64_t hz, int64_t cycles) {
  Frames frames(manifest);
  Sampler sampler(policy, manifest, frames.read(0));
  const auto period = std::chrono::nanoseconds(1'000'000'000 / hz);
  Report report(period);
  auto due = Clock::now();
  for (int64_t cycle = 0; cycle < cycles; ++cycle) {
    const auto [action, observed] = sampler.exchange(cycle, frames.read(static_cast<int>(cycle)));
    if (action.defined()) send_actions(action);
    due = action.defined() ? report.sent(cycle, due, observed) : report.without_action(due);
    std::this_thread::sleep_until(due);
  }
  finish(report, hz, sampler.latency());
  return 0;
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
  const Policy policy = open_policy(path, manifest.package);
  if (const char* data = std::getenv("DPA_CHECK")) {
    const double difference = check(policy, data, manifest);
    std::printf("largest difference from Python: %.1e\n", difference);
    if (!(difference < 1e-4)) return 1;
  }
  return (manifest.continuing ? act_while_sampling : act_in_turn)(policy, manifest, hz, cycles);
}

// TorchScript prints its program first, and the reason behind it.
std::string reason(std::string message) {
  while (message.ends_with('\n')) message.pop_back();
  const bool of_script = message.starts_with("The following operation failed in the TorchScript");
  const auto end = of_script ? message.rfind("Error: ") : std::string::npos;
  return end == std::string::npos ? message : message.substr(message.rfind('\n', end) + 1);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "robot: %s\n", reason(error.what_without_backtrace()).c_str());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "robot: %s\n", reason(error.what()).c_str());
    return 1;
  }
}
