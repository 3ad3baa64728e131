#include "kernels/plans/unet1d/widths.h"

#include <algorithm>

namespace dpa::kernels::unet1d {

// The next powers of two, and as many times two more as make the first level `least` wide.
static Config filled_up(const Config& config, int least) {
  Config wide = config;
  for (int i = 0; i < config.levels; i++) wide.down_dims[i] = 1 << log2_of(wide.own_dims[i] = config.down_dims[i]);
  while (wide.down_dims[0] < least)
    for (int i = 0; i < config.levels; i++) wide.down_dims[i] *= 2;
  return wide;
}

// Whether the calls would run by layers, which have the network's own widths.
static bool by_layers(const Plan& plan, int batch, int horizon, const Device& device) {
  return plan.dtype != DType::kFloat32 && layers_pay(plan, batch, horizon, device);
}

Config widths_for(const Config& config, DType dtype, int batch, int horizon, const Device& device) {
  // The first level's least width for the kernel of one sample, and for clusters; and the most (sample, time) columns
  // beyond which zeros cost more than they save.
  constexpr int kLeast[] = {128, 256}, kMostColumns = 1024;
  constexpr double kFaster = 0.95;  // where the model sees no more, the network stays as it is
  if (config.widened() || config.relu || batch < 1 || int64_t{batch} * horizon > kMostColumns) return config;
  const Plan own = make_plan(config, dtype);
  double best = kFaster;
  best *= by_layers(own, batch, horizon, device)
              ? layers_time(own, batch, horizon)
              : path_time(own, batch, horizon, choose_path(own, batch, horizon, device), device);
  Config chosen = config;
  for (const int least : kLeast) {
    const Config wide = filled_up(config, least);
    if (std::equal(wide.down_dims, wide.down_dims + config.levels, config.down_dims)) continue;
    const Plan plan = make_plan(wide, dtype);
    if (!plan.error.empty() || !reject(plan, batch, horizon, 1).empty() || by_layers(plan, batch, horizon, device))
      continue;
    const double time = path_time(plan, batch, horizon, choose_path(plan, batch, horizon, device), device);
    if (time < best) best = time, chosen = wide;
  }
  return chosen;
}

}  // namespace dpa::kernels::unet1d
