#include <algorithm>
#include <map>
#include <mutex>

#include "ops/common/dtype.h"
#include "ops/unet1d/unet1d.h"

namespace dpa {
namespace {

constexpr int64_t kFixed = 6;  // integers of a config before down_dims

Plan make_checked_plan(const char* op, at::IntArrayRef config, at::ScalarType dtype) {
  const auto* const split = std::find(config.begin() + std::min<size_t>(kFixed, config.size()), config.end(), 0);
  const bool widened = split != config.end();
  const int64_t levels = split - config.begin() - kFixed;
  DPA_CHECK(levels >= 1 && levels <= kernels::unet1d::kMaxLevels, op,
            "config must be [action_dim, kernel_size, n_groups, step_dim, cond_dim, flags, *down_dims] with 1 to 5 "
            "down_dims",
            config);
  DPA_CHECK(!widened || config.end() - split - 1 == levels, op,
            "config must have as many widths behind the 0 as down_dims, which they become", config);
  for (const int64_t value : config)
    DPA_CHECK(value >= 0 && value <= 65536, op, "config must hold numbers in 0..65536", value);
  DPA_CHECK(config[5] <= 3, op, "config must have flags of 0 to 3: 1 for FiLM with a scale, 2 for ReLU", config[5]);
  kernels::unet1d::Config c;
  c.action_dim = static_cast<int>(config[0]), c.kernel_size = static_cast<int>(config[1]);
  c.num_groups = static_cast<int>(config[2]), c.step_dim = static_cast<int>(config[3]);
  c.cond_dim = static_cast<int>(config[4]), c.film_scale = config[5] & 1, c.relu = config[5] & 2;
  c.levels = static_cast<int>(levels);
  for (int i = 0; i < c.levels; ++i) {
    c.down_dims[i] = static_cast<int>(config[kFixed + i]);
    if (widened) c.own_dims[i] = static_cast<int>(split[1 + i]);
  }
  DPA_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat8_e4m3fn, op,
            "dtype of packed weights must be float32, float16, bfloat16 or float8_e4m3fn", dtype);
  auto plan = kernels::unet1d::make_plan(c, kernel_dtype(dtype));
  TORCH_CHECK(plan.error.empty(), "dpa::", op, ": config is refused: ", plan.error);
  return plan;
}

}  // namespace

std::shared_ptr<const Plan> unet1d_plan(const char* op, at::IntArrayRef config, at::ScalarType dtype) {
  constexpr size_t kMaxPlans = 64;
  static std::mutex mutex;
  static std::map<std::pair<std::vector<int64_t>, at::ScalarType>, std::shared_ptr<const Plan>> plans;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::pair(config.vec(), dtype);
  if (const auto found = plans.find(key); found != plans.end()) return found->second;
  auto plan = std::make_shared<const Plan>(make_checked_plan(op, config, dtype));
  if (plans.size() >= kMaxPlans) plans.clear();
  return plans[key] = plan;
}

int64_t unet1d_fingerprint(const kernels::unet1d::Config& config, int64_t variant) {
  constexpr uint64_t kPrime = 65521, kFactor = 0x100000001b3;
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, a number a step
  const auto add = [&](int64_t number) { hash = (hash ^ static_cast<uint64_t>(number)) * kFactor; };
  for (const int64_t number :
       {variant, int64_t{config.action_dim}, int64_t{config.kernel_size}, int64_t{config.num_groups},
        int64_t{config.step_dim}, int64_t{config.cond_dim}, int64_t{config.flags()}, int64_t{config.levels}})
    add(number);
  for (int i = 0; i < config.levels; ++i) add(config.down_dims[i]);
  for (int i = 0; config.widened() && i < config.levels; ++i) add(config.own_dims[i]);
  return static_cast<int64_t>(hash % kPrime);
}

int64_t unet1d_packed_bytes(const Plan& plan) {
  constexpr int64_t kOrder = 3 << 8;  // of the packed tiles: one more whenever it changes, for packed weights are saved
  return plan.packed_bytes + unet1d_fingerprint(plan.config, kOrder + static_cast<int64_t>(plan.dtype));
}

void check_unet1d_pack(const Plan& plan, at::TensorList weights) {
  constexpr const char* op = "unet1d_pack";
  DPA_CHECK(weights.size() == plan.weights.size(), op,
            c10::str("weights must be the ", plan.weights.size(), " tensors that unet1d_weight_names lists"),
            weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto& info = plan.weights[i];
    const std::vector<int64_t> shape(info.shape.begin(), info.shape.end());
    check_floating(op, info.name.c_str(), weights[i]);
    check_same_type(op, info.name.c_str(), weights[i], "the first weight", weights[0]);
    check_same_device(op, info.name.c_str(), weights[i], "the first weight", weights[0]);
    DPA_CHECK(weights[i].sizes() == at::IntArrayRef(shape), op, c10::str(info.name, " must have shape ", shape),
              weights[i].sizes());
  }
}

static void check_packed(const char* op, const Plan& plan, const Tensor& packed, const char* other_name,
                         const Tensor& other) {
  check_same_device(op, "packed", packed, other_name, other);
  const int64_t bytes = unet1d_packed_bytes(plan);
  DPA_CHECK(packed.scalar_type() == at::kByte && packed.dim() == 1 && packed.sym_size(0) == bytes, op,
            c10::str("packed must be the ", bytes, " bytes that unet1d_pack makes for this config"),
            packed.scalar_type(), " ", packed.sym_sizes());
}

void check_unet1d_step_film(const char* op, const Plan& plan, const Tensor& timesteps, const Tensor& packed) {
  DPA_CHECK(timesteps.scalar_type() == at::kFloat && timesteps.dim() == 1, op, "timesteps must be float32 of shape (S)",
            timesteps.scalar_type(), " ", timesteps.sym_sizes());
  check_packed(op, plan, packed, "timesteps", timesteps);
}

void check_unet1d_film(const Plan& plan, const Tensor& timesteps, const Tensor& global_cond, const Tensor& packed) {
  constexpr const char* op = "unet1d_film";
  check_unet1d_step_film(op, plan, timesteps, packed);
  const int64_t cond = plan.config.cond_dim;
  DPA_CHECK(global_cond.defined() == (cond > 0), op,
            "global_cond must be given to a network that has one, and no other",
            global_cond.defined() ? "a tensor" : "none");
  if (cond > 0) check_shape(op, "global_cond", global_cond, {1, cond}, "(1, global_cond_dim)", "timesteps", timesteps);
}

void check_unet1d(const char* op, const Plan& plan, const UnetCall& call) {
  const auto& config = plan.config;
  const auto& sample = call.sample;
  DPA_CHECK(sample.scalar_type() == at::kFloat, op, "sample must be float32", sample.scalar_type());
  DPA_CHECK(sample.dim() == 3 && sample.sym_size(2) == config.action_dim, op,
            c10::str("sample must have shape (B, T, ", config.action_dim, ")"), sample.sym_sizes());
  const auto batch = sample.sym_size(0), horizon = sample.sym_size(1);
  const int64_t multiple = int64_t{1} << (config.levels - 1);
  DPA_CHECK(horizon > 0 && horizon % multiple == 0, op,
            c10::str("sample must have a horizon that is a positive multiple of ", multiple), horizon);

  check_packed(op, plan, call.packed, "sample", sample);
  if (call.film.defined()) {
    check_shape(op, "film", call.film, {batch, plan.film_rows}, "(B, R), rows of unet1d_film", "sample", sample);
    return;
  }
  const bool loop = call.table.defined();
  const Tensor& rows = call.step_film.defined() ? call.step_film : call.timesteps;
  const int64_t rank = call.step_film.defined() ? 2 : 1;
  const char* name = call.step_film.defined() ? "step_film" : "timesteps";
  DPA_CHECK(rows.dim() == rank, op, c10::str(name, " must have ", rank == 1 ? "one dimension" : "two dimensions"),
            "shape ", rows.sym_sizes());
  const auto steps = rows.sym_size(0);
  if (rank == 2)
    check_shape(op, name, rows, {steps, plan.film_rows}, "(S, R), of unet1d_step_film", "sample", sample);
  else
    check_shape(op, name, rows, {loop ? steps : batch}, loop ? "(S)" : "(B)", "sample", sample);
  if (config.cond_dim > 0) {
    DPA_CHECK(call.global_cond.defined(), op, "global_cond must be given to this network", "none");
    check_shape(op, "global_cond", call.global_cond, {batch, config.cond_dim}, "(B, global_cond_dim)", "sample",
                sample);
  } else {
    DPA_CHECK(!call.global_cond.defined(), op, "global_cond must be left out of a network without one", "a tensor");
  }
  if (call.local.defined()) {
    const std::vector<c10::SymInt> rows_of{batch, horizon, config.down_dims[0]};
    std::vector<c10::SymInt> all{steps};
    all.insert(all.end(), rows_of.begin(), rows_of.end());
    check_shape(op, "local", call.local, loop ? all : rows_of,
                loop ? "(S, B, T, down_dims[0])" : "(B, T, down_dims[0])", "sample", sample);
  }
  if (!loop) return;
  check_shape(op, "table", call.table, {steps, 6}, "(S, 6)", "sample", sample);
  DPA_CHECK(call.clip >= 0, op, "clip must be at least 0 (infinity turns it off)", call.clip);
  if (call.noise.defined())
    check_shape(op, "noise", call.noise, {steps, batch, horizon, config.action_dim}, "(S, B, T, A)", "sample", sample);
  DPA_CHECK(call.known.defined() == call.known_mask.defined(), op, "known and known_mask must be given together",
            call.known.defined() ? "known alone" : "known_mask alone");
  if (!call.known.defined()) return;
  check_same(op, "known", call.known, "sample", sample);
  check_same_device(op, "known_mask", call.known_mask, "sample", sample);
  DPA_CHECK(call.known_mask.scalar_type() == at::kBool && call.known_mask.sym_sizes().equals(sample.sym_sizes()), op,
            c10::str("known_mask must be bool of the shape of sample ", sample.sym_sizes()),
            call.known_mask.scalar_type(), " ", call.known_mask.sym_sizes());
}

}  // namespace dpa
