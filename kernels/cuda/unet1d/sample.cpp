// A call from end to end: the path on this device, what the host gives it, and the order of the launches.
#include <algorithm>

#include "kernels/cuda/common/device.h"
#include "kernels/cuda/common/test_limits.h"
#include "kernels/cuda/unet1d/paths.h"
#include "kernels/plans/unet1d/resident_layout.h"

namespace dpa::kernels::unet1d {

FilmView film_view(const Plan& plan, const Call& call, const Workspace& at) {
  const auto* base = static_cast<const uint8_t*>(call.workspace);
  const bool joined = call.batch == 1 || call.film;  // the observation's part is in `step` already
  const float* step = call.film ? call.film : joined ? nullptr : call.step_film;
  return {step ? step : reinterpret_cast<const float*>(base + at.step),
          joined ? nullptr : reinterpret_cast<const float*>(base + at.cond),
          call.per_sample_timesteps ? 0 : plan.film_rows, call.per_sample_timesteps ? plan.film_rows : 0};
}

LoopArguments loop_arguments(const Plan& plan, const Call& call, const Workspace& at) {
  LoopArguments a = {};
  a.batch = call.batch, a.horizon = call.horizon, a.steps = call.steps;
  a.actions = plan.config.action_dim, a.taps = plan.config.kernel_size, a.film_scale = plan.config.film_scale;
  a.steepness = plan.config.steepness();
  a.weights = static_cast<const uint8_t*>(call.packed);
  a.floats = reinterpret_cast<const float*>(a.weights + plan.floats);
  const FilmView film = film_view(plan, call, at);
  a.film_step = film.step, a.film_cond = film.cond, a.film_rows = plan.film_rows;
  a.film_step_stride = film.step_stride, a.film_sample_stride = film.sample_stride;
  a.head = plan.head, a.tail = plan.tail;
  a.initial = call.initial, a.table = call.table, a.noise = call.noise, a.condition_data = call.condition_data;
  a.condition_mask = call.condition_data ? call.condition_mask : nullptr;
  a.output = call.output, a.clip = call.clip;
  a.local = call.local, a.local_sample = int64_t{call.horizon} * plan.config.down_dims[0];
  a.local_step = call.batch * a.local_sample;
  return a;
}

// Of one sample; `joined`: with the observation's part.
static cudaError_t make_film(const Plan& plan, const void* packed, const float* timesteps, int steps, bool joined,
                             const float* global_cond, void* workspace, float* table, cudaStream_t stream) {
  if (steps == 0) return cudaSuccess;
  const size_t rows = static_cast<size_t>(steps) * plan.config.step_dim;
  auto* floats = static_cast<float*>(workspace);
  Call call = {};
  call.batch = 1, call.steps = steps, call.packed = packed, call.timesteps = timesteps, call.global_cond = global_cond;
  return film(plan, call, {floats, floats + 4 * rows, table, joined ? floats + 5 * rows : nullptr}, stream);
}

cudaError_t film_table(const Plan& plan, const void* packed, const float* timesteps, int steps,
                       const float* global_cond, void* workspace, float* table, cudaStream_t stream) {
  return make_film(plan, packed, timesteps, steps, true, global_cond, workspace, table, stream);
}

cudaError_t step_film_table(const Plan& plan, const void* packed, const float* timesteps, int steps, void* workspace,
                            float* table, cudaStream_t stream) {
  return make_film(plan, packed, timesteps, steps, false, nullptr, workspace, table, stream);
}

cudaError_t current_device(Device& made) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  made.multiprocessors = limited_multiprocessors(multiprocessors());
  const int shared = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (shared == 0) return cudaErrorInvalidDevice;
  made.shared_bytes = limited_shared_bytes(shared);
  made.hopper = runs_hopper_code();
  made.clusters = made.hopper && clusters_fit(device);
  made.team_clusters = made.hopper ? team_clusters(device) : 0;
  made.team_clusters = std::min(made.team_clusters, made.multiprocessors / 8);
  return cudaSuccess;
}

RecordShape record_shape(const Plan& plan, int batch, int horizon) {
  Device device;
  constexpr int kMostPairs = 2;  // of a kernel that records
  if (current_device(device) != cudaSuccess || choose_path(plan, batch, horizon, device) != Path::kResident) return {};
  const ResidentLayout layout = resident_layout(plan, horizon, device);
  if (layout.pairs > kMostPairs) return {};
  return {layout.blocks, static_cast<int>(plan.convs.size()) + 1};
}

cudaError_t sample(const Plan& plan, const Call& call, const Device& device, cudaStream_t stream) {
  if (!reject(plan, call.batch, call.horizon, call.steps).empty()) return cudaErrorInvalidValue;
  if (call.batch == 0 || call.steps == 0) return cudaSuccess;
  const Path path = call.path == Path::kAutomatic ? choose_path(plan, call.batch, call.horizon, device) : call.path;
  const Workspace at = workspace(plan, call.batch, call.horizon, call.steps, path, device);
  auto* base = static_cast<uint8_t*>(call.workspace);
  auto floats = [&](size_t offset) { return reinterpret_cast<float*>(base + offset); };
  const FilmBuffers buffers = {floats(at.hidden), floats(at.embedding), floats(at.step), floats(at.cond)};
  const cudaError_t error = call.film ? cudaSuccess : film(plan, call, buffers, stream);
  if (error != cudaSuccess) return error;
  switch (path) {
    case Path::kResident: return run_resident(plan, call, at, device, stream);
    case Path::kClustered: return run_clustered(plan, call, at, stream);
    case Path::kTeams: return run_teams(plan, call, at, device, stream);
    case Path::kPhases: return run_phases(plan, call, at, device, stream);
    default: return run_layered(plan, call, at, stream);
  }
}

}  // namespace dpa::kernels::unet1d
