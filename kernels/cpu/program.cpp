// A call as data: walks the plan once and gives every GEMM its buffers.
//
// GEMMs read (B, halo + times + halo, pitch) with zeros in the halo. Layers of one level and pitch share such a
// buffer, since a layer's input is dead when its output is written; an upward level's first GEMM, whose input is
// cat(value, skip), has one of its own, into which the downward level wrote the skip long before.
#include <algorithm>
#include <map>
#include <numeric>

#include "kernels/cpu/unet1d.h"

namespace dpa::kernels::cpu {
namespace {

constexpr int64_t kAlign = 64;

/// Hands out memory from `base`, or counts it.
class Space {
 public:
  explicit Space(void* base) : base_(static_cast<char*>(base)) {}
  char* bytes(int64_t count) {
    char* at = base_ ? base_ + used_ : nullptr;
    used_ += (count + kAlign - 1) / kAlign * kAlign;
    return at;
  }
  float* floats(int64_t count) { return reinterpret_cast<float*>(bytes(count * 4)); }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

using unet1d::ceil_div;

int pitch_of(const unet1d::Conv& conv) { return padded(conv.channels_in) + padded(conv.channels_skip); }

/// The input of GEMMs: `data` is time 0 of sample 0.
struct Input {
  char* data = nullptr;
  Weights kind = Weights::kFloat32;  // what it is multiplied with
  int64_t sample = 0;                // elements
  int pitch = 0;
  int64_t low = 0;  // elements to what rounding left over, where that is kept

  int element() const { return input_bytes(kind); }
  /// From a channel on.
  Destination from(int channel) const {
    return {data ? data + int64_t{1} * channel * element() : nullptr, input_dtype(kind), sample, pitch, low};
  }
};

class Builder {
 public:
  Builder(const Plan& plan, const Call& call, int team, void* workspace, Program& program)
      : plan_(plan), call_(call), team_(team), space_(workspace), p_(program) {}

  size_t build() {
    const auto& config = plan_.config;
    p_.floats = reinterpret_cast<const float*>(static_cast<const char*>(call_.packed) + plan_.floats);
    p_.halo = std::max(config.kernel_size / 2, 1);
    inputs();
    scratch();
    head();
    p_.layers.clear();
    for (size_t i = 0; i < plan_.convs.size(); i++) layer(i);
    return space_.used();
  }

 private:
  const Plan& plan_;
  const Call& call_;
  const int team_;
  Space space_;
  Program& p_;
  std::map<std::pair<int, int>, Input> shared_;
  Input joined_[unet1d::kMaxLevels];
  float* norms_ = nullptr;

  int times(int level) const { return call_.horizon >> level; }

  Weights kind(int level) const {
    // Fewer rows do not repay the conversion of the weights.
    constexpr int kFewRows = 24;
    if (plan_.dtype == DType::kFloat32) return Weights::kFloat32;
    if (plan_.dtype == DType::kFloat16) return Weights::kFloat16;
    const Weights best = p_.kernels->bfloat16;
    const bool converts = best == Weights::kBFloat16AsFloat16;
    return converts && (!call_.overflow || call_.batch * times(level) < kFewRows) ? Weights::kBFloat16 : best;
  }

  Input take(int level, int pitch) {
    Input input = {nullptr, kind(level), 0, pitch, 0};
    const int element = input.element();
    // Samples a power of two apart would compete for the same lines of a cache.
    input.sample = static_cast<int64_t>(times(level) + 2 * p_.halo) * pitch + kAlign / element;
    if (input.kind == Weights::kBFloat16Tiles) input.low = call_.batch * input.sample;
    char* data = space_.bytes((call_.batch * input.sample + input.low) * element);
    if (data) input.data = data + static_cast<int64_t>(p_.halo) * pitch * element;
    return input;
  }
  Input& input_of(const unet1d::Conv& conv) {
    return conv.skip_in >= 0 ? joined_[conv.skip_in] : shared_[{conv.level_in, pitch_of(conv)}];
  }
  void inputs() {
    const size_t begin = space_.used();
    p_.zeroed = space_.bytes(0);
    for (const auto& conv : plan_.convs)
      if (Input& input = input_of(conv); input.pitch == 0) input = take(conv.level_in, pitch_of(conv));
    p_.sample_stride = static_cast<int64_t>(call_.horizon + 2 * p_.halo) * plan_.config.action_dim;
    p_.sample = space_.floats(call_.batch * p_.sample_stride);
    p_.zeroed_bytes = space_.used() - begin;
  }

  void scratch() {
    const auto& config = plan_.config;
    const int64_t batch = call_.batch, count = call_.per_sample_timesteps ? call_.batch : call_.steps;
    int64_t widest = times(0) * padded(config.down_dims[0]), channels = padded(config.down_dims[0]);
    for (const auto& conv : plan_.convs) {
      widest = std::max<int64_t>(widest, times(conv.level_out) * padded(conv.channels_out));
      channels = std::max<int64_t>(channels, padded(conv.channels_out));
    }
    p_.raw = space_.floats(batch * widest);
    p_.residual = space_.floats(batch * widest);
    p_.value = space_.floats(batch * times(0) * padded(config.down_dims[0]));
    norms_ = space_.floats(batch * 2 * channels);
    p_.film_rows = plan_.film_rows;
    p_.sinusoid = space_.floats(count * config.step_dim);
    p_.hidden = space_.floats(count * config.step_dim * 4);
    p_.embedding = space_.floats(count * config.step_dim);
    p_.film_step = space_.floats(count * plan_.film_rows);
    p_.mish_cond = space_.floats(batch * config.cond_dim);
    p_.film_cond = space_.floats(batch * plan_.film_rows);
  }

  Epilogue epilogue(int channels, int level, int groups) const {
    Epilogue f = {};
    f.raw = p_.raw;
    f.film_scale = plan_.config.film_scale, f.relu = plan_.config.relu;
    f.film_sample[0] = call_.per_sample_timesteps ? plan_.film_rows : 0;
    f.film_sample[1] = plan_.film_rows;
    f.batch = call_.batch, f.times = times(level);
    f.channels = channels, f.pitch = padded(channels), f.groups = groups;
    // Whole groups and whole vectors; 64 channels at least where there is no norm. As many as L1 holds, so that the
    // latencies of the groups' statistics overlap, but a few tasks a thread.
    constexpr int kFloats = 4096;
    const int unit = groups ? std::lcm(channels / groups, kPanel) : 64;
    const int tasks = std::max(team_ == 1 ? 1 : ceil_div(4 * team_, f.batch), ceil_div(f.times * channels, kFloats));
    f.channels_per_task = std::min(std::max(channels / tasks / unit, 1) * unit, channels);
    f.scratch = norms_;
    f.overflow = call_.overflow;
    return f;
  }
  void send_to(Epilogue& f, size_t next) { f.next = input_of(plan_.convs[next]).from(0); }

  void head() {
    const auto& config = plan_.config;
    Epilogue& f = p_.head = epilogue(config.down_dims[0], 0, config.num_groups);
    f.bias = p_.floats + plan_.head.bias, f.norm = p_.floats + plan_.head.norm;
    send_to(f, 0);
  }

  void layer(size_t i) {
    const unet1d::Conv& conv = plan_.convs[i];
    Layer& layer = p_.layers.emplace_back();
    layer.num_gemms = conv.num_segments;
    for (int s = 0; s < conv.num_segments; s++) {
      layer.gemms[s] = gemm(conv, s);
      layer.tasks[s] = gemm_tasks(*p_.kernels, layer.gemms[s], team_);
    }
    layer.film = conv.film;
    Epilogue& f = layer.epilogue = epilogue(conv.channels_out, conv.level_out, conv.norm >= 0 ? conv.groups : 0);
    f.bias = p_.floats + conv.bias[0];
    if (conv.norm >= 0) f.norm = p_.floats + conv.norm;
    if (conv.add) {
      f.residual = p_.residual;
      if (i == 0)
        f.residual_bias = p_.floats + plan_.head.residual_bias;
      else if (plan_.convs[i - 1].num_segments == 2 && !plan_.convs[i - 1].upsample)
        f.residual_bias = p_.floats + plan_.convs[i - 1].bias[1];
    }
    if (conv.keep) f.keep = p_.residual;
    if (i + 1 < plan_.convs.size())
      send_to(f, i + 1);
    else
      f.keep = p_.value;
    if (conv.skip < 0) return;
    const Input& joined = joined_[conv.skip];
    // The skip is as wide as the value it is joined with, and lies behind it.
    f.skip = joined.from(joined.pitch / 2);
  }

  Gemm gemm(const unet1d::Conv& conv, int s) {
    const unet1d::Segment& segment = conv.segments[s];
    const Input& input = input_of(conv);
    const int words = plan_.dtype == DType::kFloat32 ? 1 : 2, pitch = padded(conv.channels_out);
    Gemm p = {};
    p.kind = input.kind;
    p.input = input.data ? input.data + static_cast<int64_t>(segment.first) * input.pitch * input.element() : nullptr;
    p.input_low = input.low;
    p.input_sample = input.sample, p.input_time = static_cast<int64_t>(conv.stride) * input.pitch;
    p.weights = reinterpret_cast<const uint32_t*>(static_cast<const char*>(call_.packed) + segment.weights);
    p.steps_per_tap = input.pitch / words, p.steps = segment.taps * p.steps_per_tap;
    p.batch = call_.batch, p.panels = pitch / kPanel;
    p.stride = conv.stride, p.first = segment.first, p.times_in = times(conv.level_in);
    p.times = conv.upsample ? p.times_in : times(conv.level_out);
    const bool residual = s == 1 && !conv.upsample;
    p.output = (residual ? p_.residual : p_.raw);
    if (conv.upsample && s == 1 && p.output) p.output += pitch;
    p.output_sample = static_cast<int64_t>(times(conv.level_out)) * pitch;
    p.output_time = conv.upsample ? 2 * pitch : pitch;
    return p;
  }
};

}  // namespace

size_t make_program(const Plan& plan, const Kernels& kernels, const Call& call, int team, void* workspace,
                    Program& program) {
  program = {};
  program.plan = &plan;
  program.kernels = &kernels;
  program.call = call;
  return Builder(plan, program.call, team, workspace, program).build();
}

}  // namespace dpa::kernels::cpu
