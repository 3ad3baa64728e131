// Builds the plan: walks the network once, names every original tensor, and gives each its place in the packed buffer.
#include "kernels/plans/unet1d/plan.h"

#include <algorithm>

namespace dpa::kernels::unet1d {
namespace {

constexpr int kTileElements = 256;

// Whether a network of these widths is the same but for channels that fill groups up: where it has no convolution between
// equal numbers of channels, they stay equal, and two inputs side by side are not filled up, whose groups would be others.
bool widens(const Config& c) {
  if (c.num_groups != kFinalGroups || c.action_dim == c.own_dims[0]) return false;
  for (int i = 0; i < c.levels; i++) {
    const Width w = c.width(i), before = c.width(i > 0 ? i - 1 : i);
    if (w.own < 1 || w.own > w.channels || w.own % c.num_groups) return false;
    if (w.own == before.own && w.channels != before.channels) return false;
    if (2 * w.own == before.own && (w.own != w.channels || before.own != before.channels)) return false;
  }
  return true;
}

std::string refuse(const Config& c, DType dtype) {
  auto say = [](const char* rule, int got) { return std::string(rule) + ", got " + std::to_string(got); };
  if (dtype == DType::kFloat64)
    return "packed weights must be float32, float16, bfloat16 or float8_e4m3fn, got float64";
  if (c.action_dim < 1) return say("action_dim must be at least 1", c.action_dim);
  if (c.levels < 1 || c.levels > kMaxLevels) return say("down_dims must have 1 to 5 levels", c.levels);
  if (c.kernel_size < 1 || c.kernel_size % 2 == 0) return say("kernel_size must be odd", c.kernel_size);
  if (c.num_groups < 1) return say("n_groups must be at least 1", c.num_groups);
  if (c.step_dim < 4 || c.step_dim % 2) return say("diffusion_step_embed_dim must be even and at least 4", c.step_dim);
  if (c.cond_dim < 0) return say("global_cond_dim must not be negative", c.cond_dim);
  for (int i = 0; i < c.levels; i++) {
    if (c.down_dims[i] < 1 || c.down_dims[i] % c.num_groups)
      return say("every width must be a multiple of n_groups", c.down_dims[i]);
  }
  if (c.down_dims[0] % kFinalGroups)
    return say("the first width must be a multiple of 8, the groups of the last block", c.down_dims[0]);
  if (c.widened() && !widens(c)) return "widths that are widened must leave the network's structure as it is";
  return "";
}

class Builder {
 public:
  Builder(Plan& plan) : p(plan), c(plan.config) {}

  void build() {
    choose_slices();
    time_embedding();
    for (int i = 0; i < c.levels; i++) {
      const std::string name = "down_modules." + std::to_string(i) + ".";
      const Width dim = c.width(i);
      if (i == 0)
        first_block(name + "0.");
      else
        block(name + "0.", c.width(i - 1), -1, dim, i);
      block(name + "1.", dim, -1, dim, i);
      if (i > 0) p.convs.back().skip = i;
      if (i + 1 < c.levels) downsample(name + "2.conv.", dim, i);
    }
    const int last = c.levels - 1;
    for (int i = 0; i < 2; i++) block("mid_modules." + std::to_string(i) + ".", c.width(last), -1, c.width(last), last);
    for (int i = last; i > 0; i--) {
      const std::string name = "up_modules." + std::to_string(last - i) + ".";
      block(name + "0.", c.width(i), i, c.width(i - 1), i);
      block(name + "1.", c.width(i - 1), -1, c.width(i - 1), i);
      upsample(name + "2.conv.", c.width(i - 1), i);
    }
    last_block();
    cut();
    place();
  }

 private:
  Plan& p;
  const Config& c;
  int64_t float_count = 0;
  struct Film {
    int weight, bias, rows, row;
  };
  std::vector<Film> films;
  int step_weight[4];

  void choose_slices() {
    // Of several groups, slices that would be filled up to 16 channels serve phases and teams worse than fewer slices.
    bool eight = c.num_groups % 8 == 0;
    for (int i = 0; i < c.levels; i++) eight = eight && c.down_dims[i] % (c.num_groups == 8 ? 32 : 128) == 0;
    p.slices_in = eight ? 8 : 1;
    p.slices_out = 1;
    if (!eight) return;
    for (int slices = 16; slices > 1; slices /= 2) {
      bool fits = true;
      for (int i = 0; i < c.levels; i++) fits = fits && c.down_dims[i] % (16 * slices) == 0;
      if (fits) {
        p.slices_out = slices;
        break;
      }
    }
  }

  // A dimension of a weight: so many elements, or `count` widths side by side.
  struct Dim {
    Width width;
    int count = 0;
    Dim(int n) : width{n, n} {}
    Dim(Width w, int n = 1) : width(w), count(n) {}
  };
  int weight(const std::string& name, const std::vector<Dim>& shape) {
    WeightInfo info{name, {}, {}};
    for (size_t d = 0; d < shape.size(); d++) {
      const auto& [width, count] = shape[d];
      info.shape.push_back(width.own * std::max(count, 1));
      if (c.widened() && count > 0)
        info.fill[d] = {count * c.num_groups, width.own / c.num_groups, width.channels / c.num_groups};
    }
    p.weights.push_back(std::move(info));
    return static_cast<int>(p.weights.size()) - 1;
  }
  // A vector, or a permuted tensor, of floats; returns its offset in floats.
  int64_t floats(int index, int n0, int n1 = 1, int n2 = 1, int64_t s0 = 1, int64_t s1 = 0, int64_t s2 = 0) {
    const int64_t at = float_count;
    p.copies.push_back({index, true, at * 4, 0, {n0, n1, n2}, {s0, s1, s2}});
    float_count += (static_cast<int64_t>(n0) * n1 * n2 + 3) / 4 * 4;
    return at;
  }
  // A convolution's bias; `groups`: of the norm behind it, or 0.
  int64_t bias(const std::string& name, Width dim, int groups = 0) {
    const int64_t at = floats(weight(name + "bias", {dim}), dim.channels);
    if (groups > 0) p.copies.back().groups = groups, p.copies.back().counted = dim.own / groups;
    return at;
  }
  int64_t zeros(int n) {
    const int64_t at = float_count;
    p.copies.push_back({-1, true, at * 4, 0, {n, 1, 1}, {1, 0, 0}});
    float_count += (n + 3) / 4 * 4;
    return at;
  }

  void time_embedding() {
    const int d = c.step_dim;
    step_weight[0] = weight("diffusion_step_encoder.1.weight", {4 * d, d});
    step_weight[1] = weight("diffusion_step_encoder.1.bias", {4 * d});
    step_weight[2] = weight("diffusion_step_encoder.3.weight", {d, 4 * d});
    step_weight[3] = weight("diffusion_step_encoder.3.bias", {d});
    p.step_bias[0] = floats(step_weight[1], 4 * d);
    p.step_bias[1] = floats(step_weight[3], d);
  }

  int64_t norm(const std::string& name, Width dim) {
    const int gamma = weight(name + "weight", {dim}), beta = weight(name + "bias", {dim}), channels = dim.channels;
    float_count = (float_count + 3) / 4 * 4;
    const int64_t at = float_count;
    p.copies.push_back({gamma, true, at * 4, 0, {channels, 1, 1}, {1, 0, 0}});
    p.copies.push_back({beta, true, (at + channels) * 4, 0, {channels, 1, 1}, {1, 0, 0}});
    float_count += (2 * channels + 3) / 4 * 4;
    return at;
  }

  int64_t film(const std::string& name, Width dim) {
    const int widths = c.film_scale ? 2 : 1, rows = widths * dim.channels;
    const int w = weight(name + "cond_encoder.1.weight", {{dim, widths}, c.step_dim + c.cond_dim});
    const int b = weight(name + "cond_encoder.1.bias", {{dim, widths}});
    films.push_back({w, b, rows, p.film_rows});
    p.film_rows += rows;
    return p.film_rows - rows;
  }

  Conv& add_conv(int in, int skip, Width out, int level) {
    p.convs.emplace_back();
    Conv& conv = p.convs.back();
    conv.channels_in = in, conv.channels_skip = skip, conv.channels_out = out.channels, conv.counted = out.own;
    conv.level_in = conv.level_out = level;
    return conv;
  }
  void tiles(int segment, int w, int taps, int first, int64_t so, int64_t si, int64_t st, int tap_first = 0,
             int tap_step = 1) {
    Conv& conv = p.convs.back();
    conv.segments[segment].taps = taps, conv.segments[segment].first = first;
    conv.num_segments = segment + 1;
    const int tap_count = w < 0 ? 1 : p.weights[w].shape[2];
    p.tiles.push_back({w, static_cast<int>(p.convs.size()) - 1, segment, so, si, st, tap_first, tap_step, tap_count});
  }
  // `count`: inputs of width `in` side by side.
  void plain_tiles(int segment, const std::string& name, Width in, int count, Width out, int k, int groups = 0) {
    const int w = weight(name + "weight", {out, {in, count}, k});
    tiles(segment, w, k, -(k / 2), static_cast<int64_t>(in.channels) * count * k, k, 1);
    p.convs.back().bias[segment] = bias(name, out, groups);
  }

  void second_conv(const std::string& name, Width dim, int level) {
    add_conv(dim.channels, 0, dim, level);
    plain_tiles(0, name + "blocks.1.block.0.", dim, 1, dim, c.kernel_size, c.num_groups);
    Conv& conv = p.convs.back();
    conv.norm = norm(name + "blocks.1.block.1.", dim);
    conv.groups = c.num_groups;
    conv.add = true;
  }

  void first_block(const std::string& name) {
    const Width dim = c.width(0);
    const int a = c.action_dim, channels = dim.channels, k = c.kernel_size;
    const int w = weight(name + "blocks.0.block.0.weight", {dim, a, k});
    p.head.weights = floats(w, k, a, channels, 1, k, static_cast<int64_t>(a) * k);
    p.head.bias = bias(name + "blocks.0.block.0.", dim, c.num_groups);
    p.head.norm = norm(name + "blocks.0.block.1.", dim);
    p.head.film = film(name, dim);
    if (a == dim.own) {
      p.head.residual = float_count;
      p.copies.push_back({-2, true, float_count * 4, 0, {a, channels, 1}, {0, 0, 0}});
      float_count += static_cast<int64_t>(a) * channels;
      p.head.residual_bias = zeros(channels);
    } else {
      p.head.residual = floats(weight(name + "residual_conv.weight", {dim, a, 1}), a, channels, 1, 1, a);
      p.head.residual_bias = bias(name + "residual_conv.", dim);
    }
    second_conv(name, dim, 0);
  }

  // A residual block on cat(value of width `in`, skips[skip] of the same width) or on the value alone.
  void block(const std::string& name, Width in, int skip, Width out, int level) {
    const bool joined = skip >= 0;
    const int inputs = joined ? 2 : 1;
    const bool convolve = in.own * inputs != out.own;
    if (!convolve && !joined) p.convs.back().keep = true;
    add_conv(in.channels, joined ? in.channels : 0, out, level);
    p.convs.back().skip_in = skip;
    plain_tiles(0, name + "blocks.0.block.0.", in, inputs, out, c.kernel_size, c.num_groups);
    p.convs.back().norm = norm(name + "blocks.0.block.1.", out);
    p.convs.back().groups = c.num_groups;
    p.convs.back().film = film(name, out);
    if (convolve) {
      plain_tiles(1, name + "residual_conv.", in, inputs, out, 1);
    } else if (joined) {
      tiles(1, -1, 1, 0, 0, 0, 0);
      p.convs.back().bias[1] = zeros(out.channels);
    }
    second_conv(name, out, level);
  }

  void downsample(const std::string& name, Width dim, int level) {
    Conv& conv = add_conv(dim.channels, 0, dim, level);
    conv.stride = 2;
    conv.level_out = level + 1;
    plain_tiles(0, name, dim, 1, dim, 3);
  }

  // out[2 t] = W_3 in[t - 1] + W_1 in[t];  out[2 t + 1] = W_2 in[t] + W_0 in[t + 1]
  void upsample(const std::string& name, Width dim, int level) {
    Conv& conv = add_conv(dim.channels, 0, dim, level);
    const int64_t channels = dim.channels;
    conv.upsample = true;
    conv.level_out = level - 1;
    const int w = weight(name + "weight", {dim, dim, 4});
    tiles(0, w, 2, -1, 4, channels * 4, 1, 3, -2);
    tiles(1, w, 2, 0, 4, channels * 4, 1, 2, -2);
    p.convs.back().bias[0] = p.convs.back().bias[1] = bias(name, dim);
  }

  void last_block() {
    const Width dim = c.width(0);
    const int channels = dim.channels;
    add_conv(channels, 0, dim, 0);
    plain_tiles(0, "final_conv.0.block.0.", dim, 1, dim, c.kernel_size, kFinalGroups);
    p.convs.back().norm = norm("final_conv.0.block.1.", dim);
    p.convs.back().groups = kFinalGroups;
    const int w = weight("final_conv.1.weight", {c.action_dim, dim, 1});
    p.tail.weights = floats(w, c.action_dim, channels, 1, channels, 1);
    p.tail.bias = floats(weight("final_conv.1.bias", {c.action_dim}), c.action_dim);
  }

  // Eight slices of the input, or as many as leave 16 whole channels and whole groups to each.
  void cut() {
    int groups = c.num_groups;
    for (Conv& conv : p.convs) {
      conv.slices_in = p.slices_in;
      for (int n = 8; n > 1 && p.slices_in == 1 && conv.slices_in == 1; n--)
        if (conv.channels_in % (16 * n) == 0 && (groups == 0 || groups % n == 0)) conv.slices_in = n;
      groups = conv.norm >= 0 ? conv.groups : 0;
    }
  }

  void place() {
    const int bytes = element_bytes(p.dtype);
    auto align = [](int64_t n) { return (n + 127) / 128 * 128; };
    int64_t at = 0;
    for (Conv& conv : p.convs) {
      const Tiling t = tiling(p, conv);
      for (int s = 0; s < conv.num_segments; s++) {
        conv.segments[s].weights = at;
        at += align(static_cast<int64_t>(p.slices_out) * conv.slices_in * conv.segments[s].taps * t.steps_per_tap() *
                    t.row_tiles * kTileElements * bytes);
      }
    }
    p.tile_bytes = at;
    for (Conv& conv : p.convs) {
      if (p.dtype != DType::kFloat8E4M3) break;
      conv.scale = float_count;
      float_count += static_cast<int64_t>(conv.num_segments) * conv.channels_out;
    }
    float_count = (float_count + 3) / 4 * 4;
    p.film_bias = float_count;
    for (const Film& f : films)
      p.copies.push_back({f.bias, true, (float_count + f.row) * 4, 0, {f.rows, 1, 1}, {1, 0, 0}});
    float_count += p.film_rows;
    p.floats = at;
    for (CopyItem& item : p.copies) item.destination += at;
    at = align(at + float_count * 4);
    const int d = c.step_dim, dense_bytes = element_bytes(dense_dtype(p.dtype));
    for (int i = 0; i < 2; i++) {
      p.step_weights[i] = at;
      const int rows = i ? d : 4 * d, columns = i ? 4 * d : d;
      p.copies.push_back({step_weight[2 * i], false, at, 0, {rows, columns, 1}, {columns, 1, 0}});
      at = align(at + static_cast<int64_t>(4) * d * d * dense_bytes);
    }
    p.film_step = at;
    for (const Film& f : films)
      p.copies.push_back({f.weight,
                          false,
                          at + static_cast<int64_t>(f.row) * d * dense_bytes,
                          0,
                          {f.rows, d, 1},
                          {d + c.cond_dim, 1, 0}});
    at = align(at + static_cast<int64_t>(p.film_rows) * d * dense_bytes);
    p.film_cond = at;
    if (c.cond_dim > 0) {
      for (const Film& f : films) {
        p.copies.push_back({f.weight,
                            false,
                            at + static_cast<int64_t>(f.row) * c.cond_dim * dense_bytes,
                            d,
                            {f.rows, c.cond_dim, 1},
                            {d + c.cond_dim, 1, 0}});
      }
    }
    p.stamp = align(at + static_cast<int64_t>(p.film_rows) * c.cond_dim * dense_bytes);
    p.packed_bytes = p.stamp + kStampBytes;
  }
};

}  // namespace

Tiling tiling(const Plan& plan, const Conv& conv) {
  Tiling t;
  t.rows = conv.channels_out / plan.slices_out;
  t.row_tiles = ceil_div(t.rows, 16);
  t.in = conv.channels_in / conv.slices_in;
  t.skip = conv.channels_skip / conv.slices_in;
  t.in_steps = ceil_div(t.in, 16);
  t.skip_steps = ceil_div(t.skip, 16);
  return t;
}

int64_t multiply_adds(const Plan& plan, int batch, int horizon) {
  int64_t sum = 0;
  for (const Conv& conv : plan.convs) {
    // The two segments of an upsampling GEMM make every other output time each.
    const int64_t times = int64_t{batch} * (horizon >> conv.level_out) / (conv.upsample ? 2 : 1);
    for (int i = 0; i < conv.num_segments; i++)
      sum += times * conv.segments[i].taps * (conv.channels_in + conv.channels_skip) * conv.channels_out;
  }
  return sum;
}

Plan make_plan(const Config& config, DType dtype) {
  Plan plan;
  plan.config = config;
  plan.dtype = dtype;
  plan.error = refuse(config, dtype);
  if (plan.error.empty()) Builder(plan).build();
  return plan;
}

}  // namespace dpa::kernels::unet1d
