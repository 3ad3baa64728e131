#include "kernels/plans/unet1d/widths.h"

#include <algorithm>

namespace dpa::kernels::unet1d {

// Groups of a multiple of four channels; or, where a `least` width of the first level is given, the next powers of two,
// and as many times two more as make it so wide.
static Config filled_up(const Config& config, int least) {
  Config wide = config;
  for (int i = 0; i < config.levels; i++) {
    wide.own_dims[i] = config.down_dims[i];
    wide.down_dims[i] = least > 0 ? 1 << log2_of(wide.own_dims[i]) : round_up(wide.own_dims[i], 4 * config.num_groups);
  }
  while (wide.down_dims[0] < least)
    for (int i = 0; i < config.levels; i++) wide.down_dims[i] *= 2;
  return wide;
}

Config widths_for(const Config& config, DType dtype, int batch, int horizon, bool layers, const Device& device) {
  // The first level's least width for the kernel of one sample, and for clusters; 0: for teams. And the most (sample,
  // time) columns beyond which zeros cost more than they save.
  constexpr int kLeast[] = {0, 128, 256}, kMostColumns = 4096;
  // Memory that is taken for speed: so many times the network's own, or so much; and so many times its channels.
  constexpr int64_t kMostTimes = 4, kMostBytes = 192 << 20;
  constexpr int kMostWider = 4;
  constexpr double kFaster = 0.95;  // where the model sees no more, the network stays as it is
  if (config.widened()) return config;
  if (batch < 1 || int64_t{batch} * horizon > kMostColumns) return config;
  const auto by_layers = [&](const Plan& plan) {  // which have the network's own widths
    return layers && layers_pay(plan, batch, horizon, device);
  };
  const Plan own = make_plan(config, dtype);
  const Path path = choose_path(own, batch, horizon, device);
  double best = kFaster * (by_layers(own) ? layers_time(own, batch, horizon, device)
                                          : path_time(own, batch, horizon, path, device));
  Config chosen = config;
  for (const int least : kLeast) {
    const Config wide = filled_up(config, least);
    if (std::equal(wide.down_dims, wide.down_dims + config.levels, config.down_dims)) continue;
    if (wide.down_dims[0] > kMostWider * config.down_dims[0]) continue;
    const Plan plan = make_plan(wide, dtype);
    if (!plan.error.empty() || plan.tile_bytes > std::max(kMostBytes, kMostTimes * own.tile_bytes)) continue;
    if (!reject(plan, batch, horizon, 1).empty() || by_layers(plan)) continue;
    const Path wide_path = choose_path(plan, batch, horizon, device);
    const double time = path_time(plan, batch, horizon, wide_path, device);
    if (wide_path != Path::kLayered && time < best) best = time, chosen = wide;
  }
  return chosen;
}

}  // namespace dpa::kernels::unet1d
