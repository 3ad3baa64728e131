// Networks with random weights, packed as the plan says, and the loops of them that a test runs on the device, or on the
// host's emulator of it (DPA_EMULATE), beside the float64 reference.
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/plans/unet1d/loop.h"
#ifndef DPA_EMULATE
#include "test/kernels/device.h"
#endif
#include "test/kernels/unet1d_reference.h"

namespace dpa::test {

using namespace dpa::kernels;
using namespace dpa::kernels::unet1d;

#ifdef DPA_EMULATE
inline void* allocate(size_t n) {
  void* p = std::aligned_alloc(256, (n + 255) / 256 * 256);
  std::memset(p, 0xff, n);
  return p;
}
inline void release(void* p) { std::free(p); }
inline void upload(void* to, const void* from, size_t n) { std::memcpy(to, from, n); }
inline void download(void* to, const void* from, size_t n) { std::memcpy(to, from, n); }
inline void clear(void* p, size_t n) { std::memset(p, 0, n); }
#else
inline void* allocate(size_t n) {
  void* p;
  CHECK(cudaMalloc(&p, n));
  CHECK(cudaMemset(p, 0xff, n));
  return p;
}
inline void release(void* p) { cudaFree(p); }
inline void upload(void* to, const void* from, size_t n) { CHECK(cudaMemcpy(to, from, n, cudaMemcpyHostToDevice)); }
inline void download(void* to, const void* from, size_t n) { CHECK(cudaMemcpy(to, from, n, cudaMemcpyDeviceToHost)); }
inline void clear(void* p, size_t n) { CHECK(cudaMemset(p, 0, n)); }
#endif

struct Case {
  const char* name;
  Config config;
  int batch, horizon;
};
const Case kSmall[] = {
    {"64/128/256 T16", {2, 3, {64, 128, 256}, 5, 8, 32, 20, true}, 1, 16},
    {"32/64 T8 k3 da 7 bias only batch 3", {7, 2, {32, 64}, 3, 8, 16, 5, false}, 3, 8},
    {"48/80 groups 4 T12 batch 2", {2, 2, {48, 80}, 5, 4, 16, 3, true}, 2, 12},
    {"32/64/96 groups 16 k7 T16", {5, 3, {32, 64, 96}, 7, 16, 16, 3, true}, 1, 16},
    {"24/40 groups 2 k1 T8 batch 5", {3, 2, {24, 40}, 1, 2, 16, 3, true}, 5, 8},
    {"64 T32 one level k9", {2, 1, {64}, 9, 8, 16, 3, true}, 1, 32},
    {"64/32 T8 (joined width equals output)", {2, 2, {64, 32}, 3, 8, 16, 3, true}, 1, 8},
    {"32/32/64/64 T16 (equal widths)", {2, 4, {32, 32, 64, 64}, 3, 8, 16, 3, true}, 1, 16},
    {"relu 32/64 T8 batch 2", {2, 2, {32, 64}, 3, 8, 16, 3, true, true}, 2, 8},
    {"128/64 T64 groups 32", {2, 2, {128, 64}, 3, 32, 16, 3, true}, 1, 64},
    {"32/64 T16 batch 12", {2, 2, {32, 64}, 3, 8, 16, 3, true}, 12, 16},
};
const Case kRows[] = {
    {"80 M T16", {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 1, 16},
    {"ManiSkill T16", {8, 3, {64, 128, 256}, 5, 8, 64, 84, true}, 1, 16},
    {"Simple DP3 T16", {4, 3, {128, 256, 384}, 5, 8, 128, 64, true}, 1, 16},
    {"LeRobot 252 M T64", {6, 3, {512, 1024, 2048}, 5, 8, 128, 268, true}, 1, 64},
    {"80 M T64", {14, 3, {256, 512, 1024}, 5, 8, 256, 206, true}, 1, 64},
    {"80 M T16 batch 16", {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 16, 16},
    {"DP3 252 M T16", {24, 3, {512, 1024, 2048}, 5, 8, 128, 256, true}, 1, 16},
    {"LeRobot 252 M T64 batch 8", {6, 3, {512, 1024, 2048}, 5, 8, 128, 268, true}, 8, 64},
    {"DP3 252 M T16 batch 16", {24, 3, {512, 1024, 2048}, 5, 8, 128, 256, true}, 16, 16},
    {"80 M T16 batch 4", {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 4, 16},
    {"80 M T16 batch 64", {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 64, 16},
    {"DP3 252 M T16 batch 4", {24, 3, {512, 1024, 2048}, 5, 8, 128, 256, true}, 4, 16},
    {"DP3 252 M T16 batch 64", {24, 3, {512, 1024, 2048}, 5, 8, 128, 256, true}, 64, 16},
    {"LeRobot 252 M T64 batch 2", {6, 3, {512, 1024, 2048}, 5, 8, 128, 268, true}, 2, 64},
    {"ALOHA 80 M T48 batch 16", {16, 3, {256, 512, 1024}, 5, 8, 256, 206, true}, 16, 48},
    {"80 M k3 T16 batch 16", {2, 3, {256, 512, 1024}, 3, 8, 256, 132, true}, 16, 16},
    {"NoMaD T8 k3", {2, 3, {64, 128, 256}, 3, 8, 256, 256, false}, 1, 8},
    {"ALOHA 80 M T48", {16, 3, {256, 512, 1024}, 5, 8, 256, 206, true}, 1, 48},
    {"80 M k3 T16", {2, 3, {256, 512, 1024}, 3, 8, 256, 132, true}, 1, 16},
    {"80 M T32", {2, 3, {256, 512, 1024}, 5, 8, 256, 132, true}, 1, 32},
    {"Simple DP3 T16 batch 16", {4, 3, {128, 256, 384}, 5, 8, 128, 64, true}, 16, 16},
    {"ManiSkill T16 batch 16", {8, 3, {64, 128, 256}, 5, 8, 64, 84, true}, 16, 16},
    {"96/192/320 T16 k7", {2, 3, {96, 192, 320}, 7, 8, 64, 20, true}, 1, 16},
    {"256/512 T16 batch 8", {2, 2, {256, 512}, 5, 8, 128, 40, true}, 8, 16},
    {"64/128/256 T256", {2, 3, {64, 128, 256}, 5, 8, 64, 20, true}, 1, 256},
};
inline const char* name_of(DType d) {
  return d == DType::kFloat32 ? "fp32" : d == DType::kFloat16 ? "fp16" : d == DType::kBFloat16 ? "bf16" : "e4m3";
}

inline std::vector<float> random_values(size_t n, uint32_t seed, float scale) {
  std::vector<float> v(n);
  uint32_t s = seed * 2654435761u + 12345u;
  for (float& x : v) {
    s = s * 1664525u + 1013904223u;
    x = (static_cast<float>(s >> 8) / 8388608.0f - 1.0f) * scale;
  }
  return v;
}

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline uint16_t to_bf16(float x) {
  const uint32_t u = bits_of(x);
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }
// Rounds |x| < limit to `mantissa` bits above exponents down to `least`, ties to even.
inline float round_to(float x, int mantissa, int least) {
  if (x == 0.0f) return 0.0f;
  int e;
  std::frexp(x, &e);
  const int shift = std::max(e - 1, least) - mantissa;
  return std::ldexp(std::nearbyint(std::ldexp(x, -shift)), shift);
}
inline uint16_t to_fp16(float x) {  // x is a float16 number
  const uint32_t sign = bits_of(x) >> 31;
  const float m = std::fabs(x);
  if (m < 6.103515625e-05f) return static_cast<uint16_t>(sign << 15 | static_cast<uint32_t>(m * 16777216.0f));
  const uint32_t u = bits_of(m);
  return static_cast<uint16_t>(sign << 15 | ((u >> 23) - 112) << 10 | (u >> 13 & 0x3ff));
}
inline uint8_t to_e4m3(float x) {  // x is an e4m3 number
  const uint32_t sign = bits_of(x) >> 31;
  const float m = std::fabs(x);
  if (m < 0.015625f) return static_cast<uint8_t>(sign << 7 | static_cast<uint32_t>(m * 512.0f));
  const uint32_t u = bits_of(m);
  return static_cast<uint8_t>(sign << 7 | ((u >> 23) - 120) << 3 | (u >> 20 & 7));
}

// Where a TileItem's original element lies.
inline size_t element(const TileItem& t, int o, int in, int tap) {
  return static_cast<size_t>(o) * t.stride_out + static_cast<size_t>(in) * t.stride_in +
         static_cast<size_t>(t.tap_first + tap * t.tap_step) * t.stride_tap;
}

// A weight with zeros where a widened network has channels that only fill its groups up, or without them.
inline std::vector<float> refill(const std::vector<float>& from, const WeightInfo& info, bool fill) {
  int own[2] = {info.shape[0], info.shape.size() > 1 ? info.shape[1] : 1}, wide[2] = {own[0], own[1]}, inner = 1;
  for (size_t d = 2; d < info.shape.size(); d++) inner *= info.shape[d];
  for (int d = 0; d < 2; d++)
    if (info.fill[d].groups > 0) wide[d] = info.fill[d].groups * info.fill[d].width;
  auto place = [&](int d, int i) {
    const auto& f = info.fill[d];
    return f.groups > 0 ? i / f.own * f.width + i % f.own : i;
  };
  std::vector<float> to(static_cast<size_t>(inner) * (fill ? wide[0] * wide[1] : own[0] * own[1]), 0.0f);
  for (int i = 0; i < own[0]; i++)
    for (int j = 0; j < own[1]; j++) {
      const size_t narrow = (static_cast<size_t>(i) * own[1] + j) * inner,
                   filled = (static_cast<size_t>(place(0, i)) * wide[1] + place(1, j)) * inner;
      std::copy_n(from.data() + (fill ? narrow : filled), inner, to.data() + (fill ? filled : narrow));
    }
  return to;
}

struct Network {
  Plan plan;
  Weights weights;  // as the arithmetic sees them
  std::vector<float> floats;

  Network(const Config& config, DType dtype) : plan(make_plan(config, dtype)) {
    if (!plan.error.empty()) std::printf("%s\n", plan.error.c_str()), std::exit(1);
    std::vector<std::vector<float>> v(plan.weights.size());
    parallel(static_cast<int>(v.size()), [&](int i) {
      const WeightInfo& info = plan.weights[i];
      size_t n = 1;
      for (int d : info.shape) n *= d;
      const bool matrix = info.shape.size() > 1;
      const float fan = matrix ? static_cast<float>(n) / info.shape[0] : 1.0f;
      v[i] = random_values(n, i + 1, matrix ? 1.7f / std::sqrt(fan) : 0.3f);
      if (!matrix && info.name.find(".block.1.weight") != std::string::npos)
        for (float& x : v[i]) x += 1.0f;
      v[i] = refill(v[i], info, /*fill=*/true);
    });
    make_floats(v);
    round(v);
    for (size_t i = 0; i < v.size(); i++) weights[plan.weights[i].name] = std::move(v[i]);
  }
  // The network's own: what the reference computes.
  Config own_config() const {
    Config own = plan.config;
    for (int i = 0; i < own.levels; i++) own.down_dims[i] = plan.config.width(i).own, own.own_dims[i] = 0;
    return own;
  }
  Weights own_weights() const {
    Weights own;
    for (const WeightInfo& info : plan.weights) own[info.name] = refill(weights.at(info.name), info, /*fill=*/false);
    return own;
  }
  void make_floats(const std::vector<std::vector<float>>& v) {
    int64_t end = 0;
    for (const CopyItem& c : plan.copies)
      if (c.to_float)
        end = std::max(end, (c.destination - plan.floats) / 4 + static_cast<int64_t>(c.n[0]) * c.n[1] * c.n[2]);
    for (const Conv& c : plan.convs)
      if (c.scale >= 0) end = std::max(end, c.scale + c.num_segments * c.channels_out);
    floats.assign(end + 16, 0.0f);
    for (const CopyItem& c : plan.copies) {
      if (!c.to_float) continue;
      float* to = floats.data() + (c.destination - plan.floats) / 4;
      for (int i = 0; i < c.n[0]; i++)
        for (int j = 0; j < c.n[1]; j++)
          for (int l = 0; l < c.n[2]; l++, to++)
            *to = c.weight >= 0 ? v[c.weight][c.offset + i * c.stride[0] + j * c.stride[1] + l * c.stride[2]]
                  : c.weight == -2 && i == j ? 1.0f
                                             : 0.0f;
      if (c.groups > 0) centre(to - c.n[0], c);
    }
  }
  // Biases in front of a norm, less the mean of each group.
  static void centre(float* to, const CopyItem& c) {
    const int width = c.n[0] / c.groups;
    for (int g = 0; g < c.groups; g++, to += width) {
      double mean = 0;
      for (int i = 0; i < c.counted; i++) mean += to[i] / c.counted;
      for (int i = 0; i < c.counted; i++) to[i] -= static_cast<float>(mean);
    }
  }
  // The convolutions' weights as the tiles hold them.
  void round(std::vector<std::vector<float>>& v) {
    std::vector<char> done(v.size(), 0);
    for (const TileItem& t : plan.tiles) {
      const Conv& conv = plan.convs[t.conv];
      const int outs = conv.channels_out, ins = conv.channels_in + conv.channels_skip;
      const bool scaled = plan.dtype == DType::kFloat8E4M3;
      if (t.weight < 0) {
        for (int o = 0; scaled && o < outs; o++) floats[conv.scale + t.segment * outs + o] = 1.0f / 448.0f;
        continue;
      }
      auto& w = v[t.weight];
      if (scaled) {
        // both segments of an upsampling convolution share a tensor: the scale is of the original weights
        parallel(outs, [&](int o) {
          float most = 0.0f;
          for (int i = 0; i < ins; i++)
            for (int k = 0; k < t.tap_count; k++)
              most = std::max(most,
                              std::fabs(w[static_cast<size_t>(o) * t.stride_out + i * t.stride_in + k * t.stride_tap]));
          floats[conv.scale + t.segment * outs + o] = most / 448.0f;
        });
      }
      if (done[t.weight]) continue;
      done[t.weight] = 1;
      parallel(outs, [&](int o) {
        const float s = scaled ? floats[conv.scale + t.segment * outs + o] : 1.0f;
        for (int i = 0; i < ins; i++)
          for (int k = 0; k < t.tap_count; k++) {
            float& x = w[static_cast<size_t>(o) * t.stride_out + i * t.stride_in + k * t.stride_tap];
            if (plan.dtype == DType::kBFloat16) x = from_bf16(to_bf16(x));
            if (plan.dtype == DType::kFloat16) x = round_to(x, 10, -14);
            if (scaled) x = s * round_to(x / s, 3, -6);
          }
      });
    }
  }

  std::vector<uint8_t> pack() const {
    const int bytes = element_bytes(plan.dtype);
    std::vector<uint8_t> packed(plan.tile_bytes);
    for (const TileItem& t : plan.tiles) {
      const Conv& conv = plan.convs[t.conv];
      const Segment& g = conv.segments[t.segment];
      const Tiling y = tiling(plan, conv);
      const std::vector<float>* w = t.weight < 0 ? nullptr : &weights.at(plan.weights[t.weight].name);
      const int per_tap = y.steps_per_tap(), slice = g.taps * per_tap * y.row_tiles;
      parallel(plan.slices_out * conv.slices_in, [&](int part) {
        for (int i = 0; i < slice; i++) {
          const int step = i / y.row_tiles, tap = step / per_tap, s = step % per_tap, skip = s >= y.in_steps;
          uint8_t* to = packed.data() + g.weights + (static_cast<int64_t>(part) * slice + i) * 256 * bytes;
          for (int r = 0; r < 16; r++)
            for (int k = 0; k < 16; k++) {
              const int row = i % y.row_tiles * 16 + r, o = part / conv.slices_in * y.rows + row,
                        c = (skip ? s - y.in_steps : s) * 16 + k, width = skip ? y.skip : y.in,
                        in = (skip ? conv.channels_in : 0) + part % conv.slices_in * width + c;
              const bool real = row < y.rows && c < width;
              store(to, r, k,
                    real ? w         ? (*w)[element(t, o, in, tap)]
                           : o == in ? 1.0f
                                     : 0.0f
                         : 0.0f,
                    real && conv.scale >= 0 ? floats[conv.scale + t.segment * conv.channels_out + o] : 1.0f);
            }
        }
      });
    }
    return packed;
  }
  void store(uint8_t* to, int row, int channel, float x, float scale) const {
    const int at = tile_index(row, channel);
    if (plan.dtype == DType::kFloat32) {
      x *= dpa::math::kWeightScale;
      const float h = round_to(x, 10, -14);
      const uint16_t high = to_fp16(h), low = to_fp16(round_to((x - h) * math::kLowScale, 10, -14));
      std::memcpy(to + at * 2, &high, 2), std::memcpy(to + 512 + at * 2, &low, 2);
    }
    const uint16_t h = plan.dtype == DType::kBFloat16 ? to_bf16(x) : plan.dtype == DType::kFloat16 ? to_fp16(x) : 0;
    if (element_bytes(plan.dtype) == 2) std::memcpy(to + at * 2, &h, 2);
    if (plan.dtype == DType::kFloat8E4M3) {
      to[at] = to_e4m3(round_to(x / scale, 3, -6));
    }
  }

  // A row of FiLM parameters, without what depends on the rounding of weights.
  std::vector<float> film(double timestep, const Vector& cond) const {
    const Config& c = plan.config;
    const int half = c.step_dim / 2;
    Vector e(c.step_dim);
    for (int i = 0; i < half; i++) {
      const float rate = std::exp(static_cast<float>(i) * static_cast<float>(-std::log(10000.0) / (half - 1)));
      const float angle = static_cast<float>(timestep) * rate;
      e[i] = std::sin(static_cast<double>(angle)), e[half + i] = std::cos(static_cast<double>(angle));
    }
    auto linear = [&](const Vector& in, const std::string& name) {
      const auto &w = weights.at(name + "weight"), &b = weights.at(name + "bias");
      Vector out(b.size());
      parallel(static_cast<int>(out.size()), [&](int r) {
        double s = b[r];
        for (size_t i = 0; i < in.size(); i++) s += static_cast<double>(w[r * in.size() + i]) * in[i];
        out[r] = s;
      });
      return out;
    };
    Vector h = linear(e, "diffusion_step_encoder.1.");
    for (double& v : h) v = dpa::test::mish(v);
    h = linear(h, "diffusion_step_encoder.3.");
    h.insert(h.end(), cond.begin(), cond.end());
    for (double& v : h) v = dpa::test::mish(v);
    std::vector<float> row;
    for (const WeightInfo& info : plan.weights) {
      const size_t at = info.name.find("cond_encoder.1.weight");
      if (at == std::string::npos) continue;
      for (double v : linear(h, info.name.substr(0, at) + "cond_encoder.1.")) row.push_back(static_cast<float>(v));
    }
    return row;
  }
};

// What a loop of a case reads and writes on the device, and its reference.
struct LoopBuffers {
  const Case& c;
  const Network& net;
  LoopArguments loop = {};
  std::vector<void*> buffers;
  std::vector<float> initial, noise, table, known;
  std::vector<uint8_t> mask;  // of the loop; one evaluation takes its input as it is
  std::vector<Vector> cond;
  int max_steps;

  void* put(const void* from, size_t n) {
    void* p = allocate(n + 64);
    upload(p, from, n);
    buffers.push_back(p);
    return p;
  }
  LoopBuffers(const Case& k, const Network& n, int steps) : c(k), net(n), max_steps(steps) {
    const Config& g = c.config;
    const size_t count = static_cast<size_t>(c.batch) * c.horizon * g.action_dim;
    initial = random_values(count, 77, 1.5f);
    noise = random_values(count * steps, 78, 1.7f);
    for (int i = 0; i < c.batch; i++) {
      const auto v = random_values(g.cond_dim, 100 + i, 1.0f);
      cond.emplace_back(v.begin(), v.end());
    }
    // FiLM: the step's row and a row of the sample, of which the engine adds two.
    std::vector<float> step_rows, cond_rows;
    const std::vector<float> base = net.film(time_of(0), cond[0]);
    const int different = std::min(steps, 4);
    std::vector<std::vector<float>> rows;
    for (int s = 0; s < different; s++) rows.push_back(net.film(time_of(s), cond[0]));
    for (int s = 0; s < steps; s++)
      step_rows.insert(step_rows.end(), rows[s % different].begin(), rows[s % different].end());
    for (int b = 0; b < c.batch; b++) {
      // FiLM is not additive in Mish(time) and Mish(cond) alone, but it is in their parts
      const std::vector<float> mine = b < 3 || b + 1 == c.batch ? net.film(time_of(0), cond[b]) : base;
      for (size_t i = 0; i < base.size(); i++) cond_rows.push_back(mine[i] - base[i]);
    }
    for (int s = 0; s < steps; s++) {
      const float r[6] = {0.9f, -0.5f, 0.4f, 0.55f, 0.1f, s + 1 < steps ? 0.1f : 0.0f};
      table.insert(table.end(), r, r + 6);
    }
    const std::vector<uint8_t> packed = net.pack();
    loop.weights = static_cast<uint8_t*>(put(packed.data(), packed.size()));
    loop.floats = static_cast<float*>(put(net.floats.data(), net.floats.size() * 4));
    known = random_values(count, 79, 1.0f);
    for (size_t i = 0; i < count; i++) mask.push_back(i % 3 == 1);
    loop.condition_data = static_cast<float*>(put(known.data(), count * 4));
    loop.condition_mask = static_cast<uint8_t*>(put(mask.data(), count));
    loop.film_step_stride = n.plan.film_rows;
    loop.film_step = static_cast<float*>(put(step_rows.data(), step_rows.size() * 4));
    loop.film_cond = static_cast<float*>(put(cond_rows.data(), cond_rows.size() * 4));
    loop.film_rows = net.plan.film_rows, loop.film_scale = g.film_scale;
    loop.steepness = g.steepness();
    loop.initial = static_cast<float*>(put(initial.data(), count * 4));
    loop.table = static_cast<float*>(put(table.data(), table.size() * 4));
    loop.noise = static_cast<float*>(put(noise.data(), noise.size() * 4));
    loop.clip = 1.0f;
    loop.output = static_cast<float*>(allocate(count * 4));
    buffers.push_back(loop.output);
    loop.batch = c.batch, loop.horizon = c.horizon, loop.actions = g.action_dim, loop.taps = g.kernel_size;
    loop.head = net.plan.head, loop.tail = net.plan.tail;
  }
  ~LoopBuffers() {
    for (void* p : buffers) release(p);
  }
  LoopBuffers(const LoopBuffers&) = delete;
  static double time_of(int step) { return 90 - 7.0 * (step % 4); }

  std::vector<float> result() const {
#ifndef DPA_EMULATE
    CHECK(cudaDeviceSynchronize());
#endif
    std::vector<float> v(initial.size());
    download(v.data(), loop.output, v.size() * 4);
    return v;
  }
  // || got - reference || / || reference || over samples 0 and the last.
  double error(int steps, bool network_alone, const std::vector<float>& got) const {
    const Config config = net.own_config();
    const Weights weights = net.own_weights();
    const Reference reference(config, weights);
    const int actions = c.config.action_dim;
    double wrong = 0, all = 0;
    for (int b = 0; b < c.batch; b += std::max(1, c.batch - 1)) {
      Signal x = dpa::test::zeros(actions, c.horizon);
      const size_t base = static_cast<size_t>(b) * c.horizon * actions;
      auto at = [&](int a, int t) { return base + static_cast<size_t>(t) * actions + a; };
      for (int a = 0; a < actions; a++)
        for (int t = 0; t < c.horizon; t++) x.at(a, t) = initial[at(a, t)];
      auto set_condition = [&] {
        for (int a = 0; a < actions; a++)
          for (int t = 0; t < c.horizon; t++)
            if (!network_alone && mask[at(a, t)]) x.at(a, t) = known[at(a, t)];
      };
      for (int s = 0; s < steps; s++) {
        set_condition();
        const Signal y = reference.forward(x, time_of(s), cond[b]);
        for (int a = 0; a < actions; a++)
          for (int t = 0; t < c.horizon; t++) {
            double& v = x.at(a, t);
            if (network_alone) {
              v = y.at(a, t);
              continue;
            }
            const float* r = table.data() + s * 6;
            const double x0 = std::clamp(static_cast<double>(r[0]) * v + r[1] * y.at(a, t), -1.0, 1.0);
            v = r[2] * x0 + r[3] * v + r[4] * y.at(a, t) + r[5] * noise[s * initial.size() + at(a, t)];
          }
      }
      set_condition();
      for (int a = 0; a < actions; a++)
        for (int t = 0; t < c.horizon; t++) {
          const double d = got[at(a, t)] - x.at(a, t);
          wrong += d * d, all += x.at(a, t) * x.at(a, t);
        }
    }
    const double e = std::sqrt(wrong / all);
    return e == e ? e : 1e9;
  }
};

inline double limit_of(DType d) { return d == DType::kFloat32 ? 2e-5 : d == DType::kBFloat16 ? 2e-2 : 3e-3; }

#ifndef DPA_EMULATE
// Microseconds of a step inside the loop: of a loop and one of a third of its steps.
template <class Launch>
float step_time(Launch launch, int most) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  float median[2];
  const int steps[2] = {most / 3, most};
  for (int k = 0; k < 2; k++) {
    std::vector<float> times;
    for (int i = 0; i < 23; i++) {
      CHECK(cudaEventRecord(begin));
      launch(steps[k]);
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, begin, end));
      if (i >= 3) times.push_back(ms * 1e3f);
    }
    std::sort(times.begin(), times.end());
    median[k] = times[times.size() / 2];
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return (median[1] - median[0]) / static_cast<float>(steps[1] - steps[0]);
}
#endif

}  // namespace dpa::test
