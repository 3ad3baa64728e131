// A packed U-Net on the GPU with random weights, which the host has as the arithmetic sees them, for unet1d_test and its
// bench. Workspaces and outputs are poisoned, and followed by guard words that must survive.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "kernels/plans/unet1d/cluster_layout.h"
#include "kernels/plans/unet1d/resident_layout.h"
#include "kernels/plans/unet1d/teams.h"
#include "test/kernels/device.h"
#include "test/kernels/unet1d_reference.h"

namespace dpa::test {

using namespace dpa::kernels;
using namespace dpa::kernels::unet1d;

// Benchmarks, of names that contain `only`.
void bench(bool all, const char* only);
void profile_case(const char* name, const Config& config, DType dtype);

inline std::mt19937 generator(1);
inline float uniform() { return std::uniform_real_distribution<float>(-1.0f, 1.0f)(generator); }
inline std::vector<float> uniform_values(size_t n, float scale = 1.0f) {
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
inline void round_to_e4m3(std::vector<float>& w, const std::vector<int>& shape, bool transposed) {
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

inline const char* name_of(DType dtype) {
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

inline Device this_device() {
  Device device;
  CHECK(current_device(device));
  return device;
}
inline bool fits(const Plan& plan, int batch, int horizon, Path path) {
  const Device device = this_device();
  switch (path) {
    case Path::kClustered: return device.clusters && cluster_layout(plan, batch, horizon).fits;
    case Path::kResident: return batch == 1 && resident_fits(plan, horizon, device);
    case Path::kTeams: return team_call(plan, batch, horizon, device).samples > 0;
    case Path::kPhases: return phase_samples(plan, batch, horizon, device) > 0;
    default: return true;
  }
}

}  // namespace dpa::test
