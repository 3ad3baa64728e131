// The U-Net and the sampling loop, slow and obvious, in float64 on the host: what the kernels are compared with.
// Tensors are (channels, times) of one sample. Weights come by their state-dict keys.
#pragma once
#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/unet1d/unet1d.h"

namespace dpa::test {

using kernels::unet1d::Config;
using Vector = std::vector<double>;
using Weights = std::map<std::string, std::vector<float>>;

struct Signal {
  int channels = 0, times = 0;
  Vector x;
  double& at(int c, int t) { return x[static_cast<size_t>(c) * times + t]; }
  double at(int c, int t) const { return t < 0 || t >= times ? 0.0 : x[static_cast<size_t>(c) * times + t]; }
};
inline Signal zeros(int channels, int times) {
  return {channels, times, Vector(static_cast<size_t>(channels) * times, 0.0)};
}
inline double mish(double x) { return x * std::tanh(x > 30 ? x : std::log1p(std::exp(x))); }

// f(i) for i below n, on every core.
template <class F>
void parallel(int n, F f) {
  const int threads = std::max(1u, std::min(std::thread::hardware_concurrency(), 16u));
  std::vector<std::thread> team;
  for (int i = 0; i < threads; i++)
    team.emplace_back([=] {
      for (int j = i; j < n; j += threads) f(j);
    });
  for (auto& t : team) t.join();
}

class Reference {
 public:
  Reference(const Config& config, const Weights& weights) : c(config), w(weights) {}

  Signal forward(const Signal& sample, double timestep, const Vector& global_cond) const {
    const Vector cond = condition(timestep, global_cond);
    Signal x = sample;
    std::vector<Signal> skips;
    for (int i = 0; i < c.levels; i++) {
      const std::string name = "down_modules." + std::to_string(i) + ".";
      x = block(x, cond, name + "0.", c.down_dims[i]);
      x = block(x, cond, name + "1.", c.down_dims[i]);
      skips.push_back(x);
      if (i + 1 < c.levels) x = conv(x, name + "2.conv.", c.down_dims[i], 3, 2, 1);
    }
    const int last = c.levels - 1;
    for (int i = 0; i < 2; i++) x = block(x, cond, "mid_modules." + std::to_string(i) + ".", c.down_dims[last]);
    for (int i = last; i > 0; i--) {
      const std::string name = "up_modules." + std::to_string(last - i) + ".";
      Signal joined = zeros(x.channels + skips[i].channels, x.times);
      for (int k = 0; k < joined.channels; k++) {
        for (int t = 0; t < x.times; t++)
          joined.at(k, t) = k < x.channels ? x.at(k, t) : skips[i].at(k - x.channels, t);
      }
      x = block(joined, cond, name + "0.", c.down_dims[i - 1]);
      x = block(x, cond, name + "1.", c.down_dims[i - 1]);
      x = conv_transposed(x, name + "2.conv.");
    }
    x = conv_block(x, "final_conv.0.block.", c.down_dims[0], 8);
    return conv(x, "final_conv.1.", c.action_dim, 1, 1, 0);
  }

 private:
  const Config& c;
  const Weights& w;

  Vector linear(const Vector& in, const std::string& name) const {
    const auto &weight = w.at(name + "weight"), &bias = w.at(name + "bias");
    Vector out(bias.size());
    for (size_t r = 0; r < out.size(); r++) {
      out[r] = bias[r];
      for (size_t i = 0; i < in.size(); i++) out[r] += static_cast<double>(weight[r * in.size() + i]) * in[i];
    }
    return out;
  }
  Vector condition(double timestep, const Vector& global_cond) const {
    const int half = c.step_dim / 2;
    Vector e(c.step_dim);
    for (int i = 0; i < half; i++) {
      const float rate = std::exp(static_cast<float>(i) * static_cast<float>(-std::log(10000.0) / (half - 1)));
      const float angle = static_cast<float>(timestep) * rate;  // the original computes the sinusoid in float32
      e[i] = std::sin(static_cast<double>(angle));
      e[half + i] = std::cos(static_cast<double>(angle));
    }
    Vector h = linear(e, "diffusion_step_encoder.1.");
    for (double& v : h) v = mish(v);
    h = linear(h, "diffusion_step_encoder.3.");
    h.insert(h.end(), global_cond.begin(), global_cond.end());
    return h;
  }
  Signal conv(const Signal& in, const std::string& name, int out_channels, int k, int stride, int padding) const {
    const auto &weight = w.at(name + "weight"), &bias = w.at(name + "bias");
    Signal out = zeros(out_channels, (in.times + 2 * padding - k) / stride + 1);
    parallel(out.channels, [&](int o) {
      for (int t = 0; t < out.times; t++) {
        double sum = bias[o];
        for (int i = 0; i < in.channels; i++) {
          for (int tap = 0; tap < k; tap++)
            sum += static_cast<double>(weight[(static_cast<size_t>(o) * in.channels + i) * k + tap]) *
                   in.at(i, t * stride - padding + tap);
        }
        out.at(o, t) = sum;
      }
    });
    return out;
  }
  // Kernel 4, stride 2, padding 1: in[t] adds weight[tap] to out[2 t - 1 + tap].
  Signal conv_transposed(const Signal& in, const std::string& name) const {
    const auto &weight = w.at(name + "weight"), &bias = w.at(name + "bias");
    Signal out = zeros(in.channels, in.times * 2);
    parallel(out.channels, [&](int o) {
      for (int t = 0; t < out.times; t++) out.at(o, t) = bias[o];
      for (int i = 0; i < in.channels; i++) {
        for (int t = 0; t < in.times; t++) {
          for (int tap = 0; tap < 4; tap++) {
            const int to = 2 * t - 1 + tap;
            if (to >= 0 && to < out.times)
              out.at(o, to) +=
                  static_cast<double>(weight[(static_cast<size_t>(i) * out.channels + o) * 4 + tap]) * in.at(i, t);
          }
        }
      }
    });
    return out;
  }
  Signal conv_block(const Signal& in, const std::string& name, int out_channels, int groups) const {
    Signal x = conv(in, name + "0.", out_channels, c.kernel_size, 1, c.kernel_size / 2);
    const auto &gamma = w.at(name + "1.weight"), &beta = w.at(name + "1.bias");
    const int width = out_channels / groups;
    for (int g = 0; g < groups; g++) {
      double mean = 0, variance = 0;
      const double n = static_cast<double>(width) * x.times;
      for (int k = g * width; k < (g + 1) * width; k++)
        for (int t = 0; t < x.times; t++) mean += x.at(k, t) / n;
      for (int k = g * width; k < (g + 1) * width; k++)
        for (int t = 0; t < x.times; t++) variance += (x.at(k, t) - mean) * (x.at(k, t) - mean) / n;
      for (int k = g * width; k < (g + 1) * width; k++) {
        for (int t = 0; t < x.times; t++) {
          const double value = (x.at(k, t) - mean) / std::sqrt(variance + 1e-5) * gamma[k] + beta[k];
          x.at(k, t) = c.relu ? std::max(value, 0.0) : mish(value);
        }
      }
    }
    return x;
  }
  Signal block(const Signal& in, const Vector& cond, const std::string& name, int out_channels) const {
    Signal x = conv_block(in, name + "blocks.0.block.", out_channels, c.num_groups);
    Vector activated(cond);
    for (double& v : activated) v = mish(v);
    const Vector film = linear(activated, name + "cond_encoder.1.");
    for (int k = 0; k < out_channels; k++) {
      for (int t = 0; t < x.times; t++)
        x.at(k, t) = c.film_scale ? film[k] * x.at(k, t) + film[out_channels + k] : x.at(k, t) + film[k];
    }
    x = conv_block(x, name + "blocks.1.block.", out_channels, c.num_groups);
    const Signal residual = in.channels == out_channels ? in : conv(in, name + "residual_conv.", out_channels, 1, 1, 0);
    for (size_t i = 0; i < x.x.size(); i++) x.x[i] += residual.x[i];
    return x;
  }
};

}  // namespace dpa::test
