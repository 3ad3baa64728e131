#include "kernels/plans/unet1d/call.h"

#include <algorithm>

#include "kernels/plans/unet1d/cluster_layout.h"

namespace dpa::kernels::unet1d {

size_t message_words(const Plan& plan, int batch, int horizon) {
  // The one-sample kernel gives every output the room of the largest, in steps of what its threads send at once.
  constexpr size_t kStep = 4096;
  size_t words = 0, outputs = 0, largest = 0;
  for (const Conv& conv : plan.convs) {
    const size_t output = static_cast<size_t>(batch) * (horizon >> conv.level_out) * conv.channels_out,
                 segments = conv.num_segments == 2 && !conv.upsample ? 2 : 1;
    words += output * segments, outputs += segments, largest = std::max(largest, output);
  }
  if (batch == 1) words = outputs * ((largest + kStep - 1) / kStep * kStep);
  const size_t tail = (static_cast<size_t>(batch) * horizon * plan.config.action_dim + 31) / 32 * 32;
  return (words + 2 * tail * plan.slices_out) * plan.slices_in;
}

Workspace workspace(const Plan& plan, int batch, int horizon, int steps) {
  Workspace w = {};
  size_t at = 0;
  auto take = [&](size_t floats) {
    const size_t begin = at;
    at += (floats * sizeof(float) + 255) / 256 * 256;
    return begin;
  };
  const size_t rows = std::max(steps, batch), dim = plan.config.step_dim,
               columns = static_cast<size_t>(batch) * horizon;
  w.hidden = take(rows * dim * 4);
  w.embedding = take(rows * dim);
  w.step = take(rows * plan.film_rows);
  w.cond = take(static_cast<size_t>(batch) * plan.film_rows);
  w.sample = take(columns * plan.config.action_dim);
  size_t widest = columns * plan.config.down_dims[0];
  for (const Conv& conv : plan.convs)
    widest = std::max(widest, static_cast<size_t>(batch) * (horizon >> conv.level_out) * conv.channels_out);
  w.value = take(widest);
  w.raw = take(widest);
  w.residual = take(widest);
  for (int i = 1; i < plan.config.levels; i++)
    w.skips[i] = take(static_cast<size_t>(batch) * (horizon >> i) * plan.config.down_dims[i]);
  w.message_bytes = message_words(plan, batch, horizon) * sizeof(uint32_t);
  const int64_t clustered = batch == 1 ? 0 : 2 * cluster_layout(plan, batch, horizon).message_bytes;
  w.messages = take(std::max(w.message_bytes, static_cast<size_t>(clustered)) / sizeof(float));
  w.bytes = at;
  return w;
}

size_t film_workspace_bytes(const Plan& plan, int steps) {
  return (static_cast<size_t>(steps) * plan.config.step_dim * 5 + plan.film_rows) * sizeof(float);
}

size_t workspace_bytes(const Plan& plan, int batch, int horizon, int steps) {
  return workspace(plan, batch, horizon, steps).bytes;
}

std::string reject(const Plan& plan, int batch, int horizon, int steps) {
  if (!plan.error.empty()) return plan.error;
  if (batch < 0) return "batch must not be negative, got " + std::to_string(batch);
  if (steps < 0) return "steps must not be negative, got " + std::to_string(steps);
  const int multiple = 1 << (plan.config.levels - 1);
  if (horizon < 1 || horizon % multiple) {
    return "horizon must be a positive multiple of 2^(levels - 1) = " + std::to_string(multiple) + ", got " +
           std::to_string(horizon);
  }
  const int64_t columns = static_cast<int64_t>(batch) * horizon;
  if (columns > kMaxColumns)
    return "batch * horizon must be at most " + std::to_string(kMaxColumns) + ", got " + std::to_string(columns);
  int64_t widest = 0;
  for (const Conv& conv : plan.convs) widest = std::max(widest, columns * conv.channels_out);
  if (widest >= int64_t{1} << 31) return "batch * horizon * channels must be below 2^31, got " + std::to_string(widest);
  return "";
}

Path choose_path(const Plan& plan, int batch, int horizon, int multiprocessors, int shared_bytes, bool clusters) {
  if (clusters && cluster_serves(plan, batch, horizon)) return Path::kClustered;
  return resident_fits(plan, batch, horizon, multiprocessors, shared_bytes) ? Path::kResident : Path::kLayered;
}

}  // namespace dpa::kernels::unet1d
